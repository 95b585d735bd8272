"""A mistake of a peer or of a rank is found by the case about it. A right connector passes all cases.

Each cell waits about eight seconds, whatever is wrong.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest

from tests.helpers import rings
from tests.helpers.rings import night
from tests.helpers.wrong import Wrong, modules_about, on
from tests.peers.conftest import MODULES, Reported, too_slow

# Not applicable: NixlConnector loads the one token after the whole blocks that D's own cache has.
LOADS_ONE = "p_is_freed_without_a_load[whole]"
QUEUED, LOADING = (f"blocks_are_kept_while_d_waits[{how}_past_lease]" for how in ("queued", "loading"))
SHORT = 0.4  # of deadlines, where one of them has to be waited for
mistake_of_rank = functools.partial(Wrong, topology="P1D2")

UNREACHABLE = (
    "unreachable_peer_fails_only_its_request[unreachable_peer] "
    "unreachable_peer_fails_only_its_request[silent_peer]"
)
OTHER_LOADS = (
    "unreachable_peer_delays_no_other_load[unreachable_peer] "
    "unreachable_peer_delays_no_other_load[silent_peer]"
)
OTHERS = (
    "unreachable_peer_delays_no_other_request[unreachable_peer] "
    f"unreachable_peer_delays_no_other_request[silent_peer] {OTHER_LOADS}"
)
BROKEN = (
    "broken_connection_fails_only_its_request[accepted] broken_connection_fails_only_its_request[answering]"
)
TOO_LATE = (
    "load_after_the_lease_is_detected[lease_ends_before_load] "
    "load_after_the_lease_is_detected[lease_ends_during_load]"
)
STOOD_THERE = "loaded what P had written there since, and ended without an error"
HELD_UP = "delays requests that have nothing to do with it"
# cases of scenarios that come after the first aborts
LATER = (
    "aborted_load_waits_for_the_last_rank abort_before_the_load_frees_p[waiting] "
    "abort_before_the_load_frees_p[asked] p_is_freed_without_a_load[dropped] "
    "abort_at_the_end_of_a_load_frees_blocks[reported] abort_at_the_end_of_a_load_frees_blocks[known] "
    "abort_at_the_end_of_a_load_frees_blocks[computed]"
)
WRONG = [
    Wrong(
        "NeverGivesUp",
        on(UNREACHABLE, r"did not end within 12 s.*\n.*without a deadline")
        | on(BROKEN, r"was reset .* did not end within 12 s\n.*waits for an answer that cannot come"),
        scale=SHORT,
        night=True,
    ),
    Wrong(
        "RaisesWhenUnreachable",
        on(
            f"{UNREACHABLE} {BROKEN} restarted_peer_is_a_new_engine[stranger]",
            "D raised RuntimeError .*every peer can be reached",
        ),
        blocked=f"{OTHERS} restarted_peer_is_a_new_engine[met] load_ends_when_p_dies".split(),
    ),
    Wrong("HoldsAllBack", on(OTHER_LOADS, HELD_UP), night=True),
    Wrong("OneAtATime", on("unreachable_peer_delays_no_other_load[silent_peer]", HELD_UP), night=True),
    Wrong(
        "WaitsForPeers",
        on(OTHERS, HELD_UP)
        | on("start_load_kv_does_not_wait_for_p[meeting]", r"start_load_kv of D took \d\.\d\d s"),
    ),
    Wrong(
        "WaitsForReads",
        on("start_load_kv_does_not_wait_for_p[reading]", r"start_load_kv of D took \d\.\d\d s"),
    ),
    Wrong(
        "TakesAnybody",
        on(
            "restarted_peer_is_a_new_engine[stranger]",
            "KV of the old engine loaded something that no engine has any more",
        )
        | on(TOO_LATE, STOOD_THERE),
    ),
    Wrong(
        "RemembersAddresses",
        on("restarted_peer_is_a_new_engine[met]", "for KV of the new engine ended with an error")
        | on("load_ends_when_p_dies", "the next request of D, from a new P, ended with an error"),
    ),
    Wrong("GivesUpForGood", on(BROKEN, "a later request, without resets, ended with an error")),
    Wrong("TrustsLeases", on(TOO_LATE, STOOD_THERE), night=True),
    Wrong(
        "LooksBefore", on("load_after_the_lease_is_detected[lease_ends_during_load]", STOOD_THERE), night=True
    ),
    Wrong(
        "NeverExpires",
        on("expired_lease_frees_blocks", "without a deadline"),
        blocked=f"{TOO_LATE} late_notification_is_ignored".split(),
        scale=SHORT,
        night=True,
    ),
    Wrong(
        "ExpiresEarly",
        on(
            "expired_lease_frees_blocks",
            r"request ([23]\.\d\d s after .*lease is 4|[5-7]\.\d\d s after .*lease is 8) s",
        ),
    ),
    Wrong(
        "HearsLateReaders",
        on("late_notification_is_ignored", "P raised AssertionError in _update_from_kv_xfer_finished"),
        blocked=f"{TOO_LATE} expired_lease_frees_blocks".split(),
    ),
    Wrong(
        "NoHeartbeats",
        on(
            f"{QUEUED} {LOADING}",
            "loaded what P had written into the blocks since",
        ),
        rules="KV-BYTES-001",  # and not KV-LEASE-004, a SHOULD
        night=True,
    ),
    Wrong("SpeaksWhenScheduled", on(QUEUED, "before it was scheduled"), night=True),
    Wrong("SpeaksUntilScheduled", on(LOADING, "for its load to end")),
    Wrong(
        "BelievesEveryMessage",
        on(
            "listener_survives_garbage_messages",
            r"a request of a new D ended with an error\nP logged \w+Error",
        ),
    ),
    mistake_of_rank(
        "WaitsForTheDrain",
        on(
            "abort_at_the_end_of_a_load_frees_blocks[known]",
            r"when the scheduler of D knew that its load had ended, and .* D still holds 4 blocks",
        ),
        blocked=["abort_at_the_end_of_a_load_frees_blocks[computed]"],
        scale=SHORT,
    ),
    mistake_of_rank(
        "SilentAtTheEnd",
        on(
            "abort_before_the_load_frees_p[waiting] abort_before_the_load_frees_p[asked]",
            "D aborted a request .* P still holds its blocks",
        ),
    ),
    mistake_of_rank(
        "SilentWithoutALoad",
        on(
            "p_is_freed_without_a_load[dropped]",
            "must not read the prefix cache, .* P still holds its blocks",
        ),
    ),
    mistake_of_rank(
        "RepeatsItself",
        on("each_rank_reports_once", "rank 1 of D named request .* 2 times in finished_recving"),
    ),
    mistake_of_rank(
        "ForgetsToSay",
        on("each_rank_reports_once", "rank 1 of D never named request"),
        scale=SHORT,
        night=True,
    ),
    mistake_of_rank(
        "NamesWhatItGaveUp",
        on("only_waiting_requests_are_reported[D]", "in finished_recving: it never waited for a load"),
        blocked=("failed_load_is_reported_once aborted_load_is_reported_at_its_end " + LATER).split(),
    ),
    mistake_of_rank(
        "NamesEveryEnd",
        on(
            "only_waiting_requests_are_reported[P]",
            "in finished_sending: request_finished did not ask to keep its blocks",
        ),
        blocked=(
            "each_rank_reports_once only_waiting_requests_are_reported[D] failed_load_is_reported_once "
            "load_ends_in_idle_steps aborted_load_is_reported_at_its_end " + LATER
        ).split(),
    ),
    mistake_of_rank(
        "RepeatsFailures", on("failed_load_is_reported_once", r"rank 1 reported block \d+ \d+ times")
    ),
    mistake_of_rank(
        "NeedsForward", on("load_ends_in_idle_steps", "it ended when D had something to compute")
    ),
    mistake_of_rank(
        "ForgetsAborted",
        on("aborted_load_is_reported_at_its_end", "ranks 0, 1 of D did not report it")
        | on("aborted_load_waits_for_the_last_rank", "rank 1 of D did not report it"),
        scale=SHORT,
    ),
    mistake_of_rank(
        "DropsAborted",
        on(
            "aborted_load_is_reported_at_its_end aborted_load_waits_for_the_last_rank",
            "reported it before its transfers had ended",
        ),
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_mistake_is_caught_by_the_case_about_it(
    run_cases: Callable[..., Reported], wrong: Wrong, pytestconfig: pytest.Config
) -> None:
    """At night, and where the file is named, modules without such a case run, too."""
    reported = run_cases(
        wrong.connector,
        wrong.topology,
        wrong.scale,
        modules=MODULES if rings.is_night(pytestconfig) else modules_about(wrong.fails, MODULES),
        judged=wrong.fails,
        shows=wrong.rules or "FAIL",
    )
    assert reported.pop(LOADS_ONE, ("NOT-APPLICABLE", ""))[0] in ("NOT-APPLICABLE", "BLOCKED")
    expected = {
        name: (wrong.rules or "FAIL")
        if name in wrong.fails
        else "BLOCKED"
        if name in wrong.blocked
        else "PASS"
        for name in reported
    }
    # What says that this machine was too slow to tell says nothing about the
    # connector; see the test of the right one.
    slow = too_slow(reported) - wrong.fails.keys()
    assert {name: outcome for name, (outcome, _) in reported.items() if name not in slow} == {
        n: e for n, e in expected.items() if n not in slow
    }
    for name, pattern in wrong.fails.items():
        assert re.search(pattern, reported[name][1], re.DOTALL), reported[name]


@pytest.mark.parametrize(("topology", "cases"), [("P1D1", 33), ("P1D2", 14), ("P2D1", 17)])
def test_a_right_connector_passes_every_case(
    run_cases: Callable[..., Reported], topology: str, cases: int
) -> None:
    reported = run_cases("Right", topology, judged=None)
    assert len(reported) == cases
    other = {name: what[0] for name, what in reported.items() if what[0] != "PASS"}
    assert other.items() <= {(LOADS_ONE, "NOT-APPLICABLE")}, reported


def test_p_need_not_report_what_it_does_not_keep(run_cases: Callable[..., Reported]) -> None:
    modules = ("protocol/peers/rank_reports",)
    reported = run_cases("tests.peers.frees_at_once:FreesAtOnce", "P1D1", modules=modules)
    assert reported["each_rank_reports_once"] == ("PASS", ""), reported
    assert "FAIL" not in {outcome for outcome, _ in reported.values()}, reported


RANKS = ("protocol/peers/rank_reports",)


def test_one_rank_may_report_for_all(run_cases: Callable[..., Reported]) -> None:
    reported = run_cases("RankZeroReports", "P1D2", modules=RANKS, judged=None)
    assert reported["each_rank_reports_once"] == ("PASS", ""), reported
    assert {outcome for outcome, _ in reported.values()} <= {"PASS", "NOT-APPLICABLE"}, reported


def test_one_rank_may_not_report_what_others_have_not_done(run_cases: Callable[..., Reported]) -> None:
    reported = run_cases("RankZeroAlone", "P1D2", modules=RANKS)
    assert reported["each_rank_reports_once"][0] == "FAIL", reported


def test_more_ranks_report_than_are_counted(run_cases: Callable[..., Reported]) -> None:
    outcome, happened = run_cases("CountsOneRank", "P1D2", modules=RANKS)["each_rank_reports_once"]
    assert outcome == "FAIL" and "AssertionError in _update_from_kv_xfer_finished" in happened, happened


@pytest.mark.night
def test_a_full_p_is_waited_for_once(run_cases: Callable[..., Reported]) -> None:
    found = run_cases("KeepsBlocks", "P1D2")
    assert {name for name, (outcome, _) in found.items() if outcome == "FAIL"} == {"each_rank_reports_once"}
    blocked = [reason for outcome, reason in found.values() if outcome == "BLOCKED"]
    waited = [
        re.search(r"P had no room for a prompt of \d+ tokens within (\S+) s: \d of", why) for why in blocked
    ]
    assert all(waited), blocked
    assert sorted({float(match[1]) for match in waited if match})[:-1] == [0.1]


# Connectors that read over connections of their own to the port that P's params name; and one that takes
# every error of NIXL for progress, of which more cases fail on a busy machine.
RESET = "load_ends_when_p_dies broken_connection_fails_only_its_request[answering]"
BREAKS = [
    Wrong(
        "WaitsForTheGone",
        on("load_ends_when_p_dies", r"the request did not end within 12 s\n.*for a peer that is gone"),
        scale=SHORT,
    ),
    Wrong("DiesOfAReset", on(RESET, "the request did not end within 12 s"), scale=SHORT, night=True),
    Wrong("TakesResetForTheEnd", on(RESET, "the request loaded wrong bytes"), night=True),
    Wrong("LooksUpFirst", on("load_ends_when_p_dies", "the request loaded wrong bytes"), night=True),
    Wrong("TcpPull", {}, night=True),
]


@pytest.mark.parametrize("wrong", BREAKS, ids=str)
def test_what_a_connector_does_when_connections_break(
    run_cases: Callable[..., Reported], wrong: Wrong
) -> None:
    only = ("protocol/peers/unreachable",)
    how = {"judged": wrong.fails or None, "shows": "FAIL" if wrong.fails else ""}
    reported = run_cases(wrong.connector, wrong.topology, wrong.scale, modules=only, **how)
    mine = {name: what for name, what in reported.items() if name.startswith(("load_ends", "broken"))}
    assert len(mine) == 3
    assert {name for name, (outcome, _) in mine.items() if outcome == "FAIL"} >= wrong.fails.keys()
    assert wrong.fails or {outcome for outcome, _ in mine.values()} == {"PASS"}, mine
    for name, pattern in wrong.fails.items():
        assert re.search(pattern, reported[name][1], re.DOTALL), reported[name]


@pytest.mark.parametrize(
    ("topology", "fails"),
    [
        night(
            "P1D1",
            {
                "unreachable_peer_delays_no_other_load[silent_peer]",
                *TOO_LATE.split(),
                QUEUED,
                "listener_survives_garbage_messages",
            },
        ),
        ("P1D2", set()),
    ],
)
def test_what_is_found_in_nixl_connector(
    run_cases: Callable[..., Reported], topology: str, fails: set[str]
) -> None:
    reported = run_cases("NixlConnector", topology, judged=None)
    assert reported.pop(LOADS_ONE)[0] == "NOT-APPLICABLE"
    wrong = {name: outcome for name, (outcome, _) in reported.items() if outcome != "PASS"}
    assert wrong == dict.fromkeys(fails, "FAIL") | dict.fromkeys(fails & {QUEUED}, "KV-BYTES-001"), reported


def test_a_long_lease_is_not_waited_for(run_cases: Callable[..., Reported]) -> None:
    reported = run_cases("TrustsLeases", "P1D1", lease_s=30)
    blocked = {
        name
        for name, (outcome, reason) in reported.items()
        if outcome == "BLOCKED" and "P may keep blocks that no peer has read for 30 s" in reason
    }
    assert blocked == {
        *TOO_LATE.split(),
        "expired_lease_frees_blocks",
        "late_notification_is_ignored",
        QUEUED,
        LOADING,
    }
