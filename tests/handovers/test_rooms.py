"""A hand-over in an author's own words is judged as any other: right ones pass, wrong ones are found."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures
from tests.helpers.wrong import Wrong, on

PROXIES = "tests.handovers.proxies"
MULTI, MATCH = "protocol/multi_connector", "protocol/matched_tokens"
NUMBERS, PARAMS = "protocol/stress/numbers", "protocol/kv_transfer_params"
NULL = "null_keys_may_be_left_out"
CASES = {
    "large_block_ids_and_offsets_arrive[P]": NUMBERS,
    "two_engines_hand_over_both_ways": "protocol/stress/roles",
    "shares_the_params_dict[last]": MULTI,
    "loads_nothing_if_another_connector_loads[first]": MULTI,
    "announces_no_freed_blocks_after_the_load[preempted]": MATCH,
    NULL: PARAMS,
}
case_runner, run_case = fixtures(
    lambda: CaseRunner("tests.handovers.rooms", "protocol", ("llama3_1_8b",), "quick"),
    lambda case_runner: partial(_run, case_runner),
    scope="module",
)


def _run(case_runner: CaseRunner, connector: str, case: str, proxy: str = "by_room") -> CellRun:
    function, _, variant = case.rstrip("]").partition("[")
    return case_runner.run(
        connector,
        "llama3_1_8b",
        setup="b16",
        declared={"handover": f"{PROXIES}:{proxy}"},
        variants=variant,
        only=lambda planned: planned.module == CASES[case] and f"::{function}[" in planned.id,
    )


@pytest.mark.parametrize("case", CASES)
def test_a_right_one_passes(run_case: Callable[..., CellRun], case: str) -> None:
    run = run_case("Right", case, "by_room_with_a_note" if case == NULL else "by_room")
    assert run.outcomes == {case: "PASS"}, [*run.findings.values(), *run.reasons.values()]


@pytest.mark.parametrize(
    ("connector", "proxy", "case"),
    [
        ("LoadsAgain", "by_room", "announces_no_freed_blocks_after_the_load[preempted]"),
        ("NeedsARank", "by_room_and_rank", NULL),
    ],
)
def test_a_right_one_of_another_kind_passes(
    run_case: Callable[..., CellRun], connector: str, proxy: str, case: str
) -> None:
    run = run_case(connector, case, proxy)
    assert run.outcomes == {case: "PASS"}, [*run.findings.values(), *run.reasons.values()]
    assert run.evidence[case].external_tokens or connector == "LoadsAgain"


WRONG = [
    Wrong(
        "MeetsTheNewest",
        on("large_block_ids_and_offsets_arrive[P]", r"KV-NUMBERS-001 after the load of \S+ \(request 0\), "),
    ),
    Wrong(
        "OneDict",
        on("shares_the_params_dict[last]", r"KV-MULTI-003 params of request 1 have \['fake-0', 'fake-1'\]"),
    ),
    Wrong(
        "CountsTheKeys",
        on("shares_the_params_dict[last]", "KV-MULTI-003 with keys of a fake connector in its params "),
    ),
    Wrong(
        "SilentWithoutALoad",
        on(
            "loads_nothing_if_another_connector_loads[first]",
            r"KV-HIT-001 .* and no step's metadata orders a notification to P$",
        ),
    ),
    Wrong(
        "LoadsFreedBlocks",
        on(
            "announces_no_freed_blocks_after_the_load[preempted]",
            r"KV-MATCH-005 after the load of cmpl-same-0000 .* it announced a second load in step",
        ),
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_one_is_found(run_case: Callable[..., CellRun], wrong: Wrong) -> None:
    [(case, says)] = wrong.fails.items()
    finding = run_case(wrong.connector, case).findings[case]
    found = f"{finding.rule} {finding.happened}"
    assert re.match(says, found), found


def test_a_null_key_that_is_needed_is_found(run_case: Callable[..., CellRun]) -> None:
    finding = run_case("NeedsTheNull", NULL, "by_room_with_a_note").findings[NULL]
    assert finding.rule == "KV-PARAMS-003"
    assert finding.happened.startswith("asked with {'room': ")


def test_without_a_null_key_there_is_nothing_to_leave_out(run_case: Callable[..., CellRun]) -> None:
    assert run_case("Right", NULL).outcomes == {NULL: "NOT-APPLICABLE"}
