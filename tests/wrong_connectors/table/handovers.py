"""Mistakes in other ways to hand over: in an author's own words, by rendezvous, and by a P that writes."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.helpers.wrong import ANY, Right, Theme, Wrong, on

HANDOVERS = "tests.wrong_connectors.handovers"
PROXIES = "tests.handovers.proxies"


def mistake(connector: str, case: str, rule: str, says: str) -> Wrong:
    """One case of one variant finds it."""
    return Wrong(connector, {case: says}, variants=case.rstrip("]").partition("[")[2], rules=rule)


def right(case: str, connector: str = "Right", **more: Any) -> Right:
    """It passes one case of one variant."""
    name, _, variant = case.rstrip("]").partition("[")
    return Right(connector, cases=name, variants=variant, passes=case, **more)


ROOMS = [
    mistake(
        "MeetsTheNewest",
        "large_block_ids_and_offsets_arrive[P]",
        "KV-NUMBERS-001",
        r"^after the load of \S+ \(request 0\), ",
    ),
    mistake(
        "OneDict",
        "shares_the_params_dict[last]",
        "KV-MULTI-003",
        r"^params of request 1 have \['fake-0', 'fake-1'\]",
    ),
    mistake(
        "CountsTheKeys",
        "shares_the_params_dict[last]",
        "KV-MULTI-003",
        "^with keys of a fake connector in its params ",
    ),
    mistake(
        "SilentWithoutALoad",
        "loads_nothing_if_another_connector_loads[first]",
        "KV-HIT-001",
        "and no step's metadata orders a notification to P$",
    ),
    mistake(
        "LoadsFreedBlocks",
        "announces_no_freed_blocks_after_the_load[preempted]",
        "KV-MATCH-005",
        "^after the load of cmpl-same-0000 .* it announced a second load in step",
    ),
]
NULL = "null_keys_may_be_left_out"
BY_NOTE = {"handover": f"{PROXIES}:by_room_with_a_note"}
ROOMS += [
    Wrong(
        "NeedsTheNull",
        {NULL: r"^asked with \{'room': "},
        rules="KV-PARAMS-003",
        declared=BY_NOTE,
    ),
    *(
        right(case)
        for case in (
            "large_block_ids_and_offsets_arrive[P]",
            "two_engines_hand_over_both_ways",
            "shares_the_params_dict[last]",
            "loads_nothing_if_another_connector_loads[first]",
            "announces_no_freed_blocks_after_the_load[preempted]",
        )
    ),
    right(NULL, declared=BY_NOTE),
    Right("Right", cases=NULL, not_applicable={NULL}),  # there is no null key
    right("announces_no_freed_blocks_after_the_load[preempted]", "LoadsAgain"),
    right(NULL, "NeedsARank", declared={"handover": f"{PROXIES}:by_room_and_rank"}, loads=True),
]
OF_BYTES = [
    mistake(
        "MeetsTheNewest",
        "attention_kv_arrives[two_at_once]",
        "KV-BYTES-001",
        r"rows of another request \(owner 1\) in all \d+ words",
    ),
    right("attention_kv_arrives[two_at_once]"),
]
OF_PARAMS = [
    mistake(
        "NeedsTheId",
        "p_survives_corrupted_params[missing]",
        "KV-PARAMS-005",
        "^with transfer_id missing: request_finished_all_groups raised KeyError",
    ),
    mistake(
        "TrustsTheProxy",
        "corrupted_params_fail_only_their_request[missing]",
        "KV-PARAMS-002",
        "^with transfer_id missing: the request waits for ever: its load was announced, and",
    ),
    right("p_survives_corrupted_params[missing]"),
    right("corrupted_params_fail_only_their_request[missing]"),
]

# Faults of a transport are made on the side that writes.
SHORT = 0.2  # of deadlines, where one of them has to be waited for
FAULTS = ("bytes/transport_faults", "bytes/each_transfer")
pushes = partial(Wrong, scale=SHORT)
PUSH = [
    pushes(
        "HidesItsFailures",
        {"every_request_ends[failed]": "neither as finished nor as failed"},
        variants="failed",
    ),
    pushes(
        "TakesFailuresForWrites",
        {"every_request_ends[failed]": "a transfer that failed is reported as if it had been made: "},
        variants="failed",
    ),
    pushes(
        "EndsWithTheFirst",
        on(
            "load_ends_with_its_last_transfer",
            "a load is reported before the last of its transfers has ended",
        ),
        variants="slow",
    ),
]


def cell(handover: str) -> dict[str, Any]:
    return {"setup": "b16", "declared": {"handover": handover}}


OF_SCHEDULERS = tuple(
    f"protocol/{name}"
    for name in ("stress/numbers", "stress/roles", "multi_connector", "matched_tokens", "kv_transfer_params")
)
THEMES = (
    Theme(
        "rooms",
        f"{HANDOVERS}.rooms",
        "protocol",
        ROOMS,
        cell=cell(f"{PROXIES}:by_room"),
        modules=OF_SCHEDULERS,
        runs="cases",
    ),
    Theme(
        "rendezvous",
        f"{HANDOVERS}.rendezvous",
        "bytes",
        OF_BYTES,
        cell=cell("rendezvous"),
        modules=("bytes/pool",),
        runs="cases",
    ),
    Theme(
        "rendezvous_params",
        f"{HANDOVERS}.rendezvous",
        "protocol",
        OF_PARAMS,
        cell=cell("rendezvous"),
        modules=OF_SCHEDULERS,
        runs="cases",
    ),
    Theme(
        "push",
        "tests.wrong_connectors.push.mistakes",
        "bytes",
        PUSH,
        cell={"setup": "b16", "declared": {"lease": "kv_lease_duration"}},
        modules=FAULTS,
        others=ANY,
    ),
)
