"""Connectors in scenarios between peers that share no engine with others."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.helpers.wrong import ANY, Right, Theme, Wrong, on
from tests.wrong_connectors.table.peers import LEASE, LEASE_S, LONGER, MODULE

PUSH, RIGHT = "tests.wrong_connectors.push", "tests.right_connectors"
LAYER_WISE, TCP = f"{RIGHT}.designs:LayerWise", f"{RIGHT}.sockets:TcpPull"
SHORT = 0.3  # of deadlines, where one of them has to be waited for

# A load that D gives up, or while P stands still, on NIXL over TCP. The words do not tell why they came: a
# read that goes on, or one that begins anew, is no matter of handles.
WOKE = "nothing_is_written_when_p_wakes"
LOAD_S = '{"kv_connector_extra_config": {"kv_lease_duration": SECONDS, "transfer_timeout": 1}}'
FOUND = (
    r"\A(?!.*NIXL).*went on when the load of D had passed its time limit and the request of D had been "
    r"aborted: rank 0 of D found bytes in blocks of other requests .*\n.*then something wrote into them, .*"
    r"rows of another request \(owner \d+\); rows that the prefiller computed instead of the decoder"
)
LATE_WRITES = [
    Wrong("CancelsByRelease", on(WOKE, FOUND)),
    Wrong("ReadsAgain", on(WOKE, FOUND)),
    Right("Reference", passes=WOKE),  # its load is kept until its read ends
]
WAITS_FOR_THE_READ = [
    Right("NixlConnector", passes=WOKE),
    Right("AsksFirst", not_applicable={WOKE: "no load of D was seen"}),
]

DIFFERENCES = {
    "model": "another model than P, of the same sizes",
    "dtype": "another dtype than P, of the same size",
    "rope": "another rotary embedding than P",
}
IDENTITY = [f"kv_of_another_model_is_not_loaded[{what}]" for what in DIFFERENCES]


def uses(connector: str, *differences: str) -> Wrong:
    """A connector that does not notice these."""
    says = (
        r"\AD has {}: a request of D loaded \d+ tokens that P had computed\nneither the handshake nor the "
        r"kv_transfer_params tell D that P's model differs, or D does not compare it\Z"
    )
    case = "kv_of_another_model_is_not_loaded[{}]"
    return Wrong(connector, {case.format(what): says.format(DIFFERENCES[what]) for what in differences})


MODELS = [
    uses("BelievesAnyModel", *DIFFERENCES),
    uses("ForgetsRope", "rope"),
    uses("NixlConnector", "rope"),  # a finding
    *(Right(connector, passes=" ".join(IDENTITY)) for connector in ("Right", "Reference", "TcpPull")),
]

# Reports of a step in which a worker failed come with those of the next: a rule since vLLM 0.33. On an older
# vLLM `failed_steps.py` brings what its aggregator lacks.
LATER = "reports_of_a_failed_step_may_come_later"
of_ranks, right_ranks = partial(Wrong, topology="P1D2"), partial(Right, topology="P1D2")
FAILED_STEPS = [
    of_ranks("CountsRanks", on(LATER, "D raised AssertionError.*rank 0 has reported twice")),
    of_ranks("CountsStatistics", on(LATER, "D raised AssertionError.*statistics of a rank came twice")),
    right_ranks("Right", passes=LATER),
    right_ranks("Reference", passes=LATER),
]

ONCE, AT_ITS_END = "each_rank_reports_once", "aborted_load_is_reported_at_its_end"
RANKS = [
    of_ranks("RankZeroAlone", on(ONCE, "")),  # reports what others have not done
    of_ranks("CountsOneRank", on(ONCE, "AssertionError in _update_from_kv_xfer_finished")),
    Wrong(
        "CancelsHalf",
        on(AT_ITS_END, "words changed that no request may change|the next request of D loaded wrong bytes"),
    ),
    Right(
        "Cancels",
        not_applicable={AT_ITS_END: "D drops transfers of an aborted load that have not begun"},
    ),
    right_ranks("RankZeroReports", passes=ONCE),
    Right("tests.wrong_connectors.peers.frees_at_once:FreesAtOnce", passes=ONCE),
]

STOPPED = "nothing_is_written_after_shutdown"
CHANGED = r"\d+ bytes of D's KV cache changed after .*, {} of them before P went on"
SHUTDOWN = [
    Wrong("LeavesThreads", on(STOPPED, CHANGED.format(r"\d+") + r"\n.*or a thread that goes on writing")),
    Wrong("KeepsAgent", on(STOPPED, CHANGED.format(0) + r"\n.*leaves a transfer")),
    Wrong("KeepsHandles", on(STOPPED, CHANGED.format(0))),
    Wrong(
        "EndsWithItsReads",
        on(STOPPED, r"shutdown\(\) had not returned after 9 s\n.*without a deadline"),
        scale=SHORT,
        night=True,
    ),
    Wrong("RaisesDuringLoads", on(STOPPED, r"shutdown\(\) raised RuntimeError: a load is under way")),
    Right(LAYER_WISE, not_applicable={STOPPED: "within the step"}),
    # on a busy machine D gives up meanwhile
    Right("AsksFirst", not_applicable={STOPPED: "begins no load|ended although P stood still"}),
    *(
        Right(connector, passes=STOPPED)
        for connector in ("Reference", "NixlConnector", "TcpPull", "KeepsIdleAgent")
    ),
]

OWN, FREED = "each_load_is_from_its_own_peer", "blocks_are_freed_whichever_d_loads"
HOLDS = "P still holds its blocks"
# What lies at an address of another P's pool may be no KV memory: then NIXL refuses to read it.
BADLY = "(loaded wrong|ended with an err)"
TWO_PEERS = [
    Wrong(
        "CountsNoticesOfAll",
        on(FREED, f"the first request of the second D was loaded, and .* {HOLDS}"),
        passes=OWN,
        night=True,
    ),
    Wrong("OnePeerAStep", on(FREED, f"from two P's at once: .* was loaded, and .* {HOLDS}"), passes=OWN),
    Wrong(
        "LoadsOrReleases",
        on(FREED, "in the step after another one has ended: the request whose load has ended was"),
        passes=OWN,
    ),
    Wrong(
        "PairsOnce",
        on(OWN, f"in turn: the first request for KV of the second P, .* {BADLY}"),
        unsure={FREED},
    ),
    Wrong(
        "PairsWithTheLast",
        on(OWN, f"in turn: the second request for KV of the first P {BADLY}"),
        unsure={FREED},
    ),
    *(
        Right(connector, passes=f"{OWN} {FREED}")
        for connector in (
            "Reference",
            "NixlConnector",
            LAYER_WISE,
            TCP,
            f"{PUSH}.right:TcpPush",
            "HoldsInPool",
        )
    ),
]

SECOND = "second_sample_loads_right_bytes_or_none"
of_samples = partial(Right, passes=SECOND)
TWO_SAMPLES = [
    Wrong("CountsTimeAlone", on(SECOND, "loaded what P had written into the blocks since")),
    Wrong(
        f"{PUSH}.mistakes:ServesOneSample",
        on(SECOND, "not end within 9 s"),
        rules="KV-HANDOVER-001",
        scale=SHORT,
    ),
    of_samples("Reference"),
    of_samples("Right"),
    of_samples(f"{RIGHT}.amount:StagesCopies", night=True),
    of_samples(f"{RIGHT}.answers:ServesOnce", night=True),
    of_samples(f"{RIGHT}.choices:CircuitBreaker"),
    of_samples(LAYER_WISE, night=True),
    of_samples(TCP),
    of_samples(f"{PUSH}.right:TcpPush"),
]

CELL = {"setup": "b16", "matrix": "full", "config": LEASE}
LONG = (30,)  # no lease is to end, however slow the machine is


def theme(name: str, module: str, records: list[Any], others: str = "PASS", **more: Any) -> Theme:
    """One module of cases, on engines of its own."""
    modules = (f"protocol/peers/{module}",)
    given = {"cell": CELL, "own_rules": True, "leases": LONGER, "first": False} | more
    return Theme(name, MODULE, "protocol", records, modules=modules, others=others, **given)


THEMES = (
    theme("late_writes", "late_writes", LATE_WRITES, cell=CELL | {"config": LOAD_S}, leases=(LEASE_S,)),
    theme("wakes", "late_writes", WAITS_FOR_THE_READ, leases=(LEASE_S,)),
    theme("models", "model_identity", MODELS),
    theme("failed_steps", "rank_reports", FAILED_STEPS, minor="0.33.0"),
    theme("ranks", "rank_reports", RANKS, others=ANY),
    theme("shutdown", "shutdown", SHUTDOWN, leases=LONG),
    theme("two_peers", "two_peers", TWO_PEERS, leases=LONG),
    theme("two_samples", "two_samples", TWO_SAMPLES, leases=LONG),
)
