"""Faults of a transport are made on the side that writes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from pytest_kvconform.rigs.scenario import POST, STATUS, Faults, faults_where_p_writes
from tests.helpers.case_runner import CellRun
from tests.helpers.wrong import Wrong, on

SHORT = 0.2  # of deadlines, where one of them has to be waited for
FAULTS = ("bytes/transport_faults", "bytes/each_transfer")


def faults(run_cases: Callable[..., CellRun], connector: str, variants: str, scale: float = 1.0) -> CellRun:
    return run_cases(
        connector,
        "llama3_1_8b",
        variants=variants,
        scale=scale,
        only=lambda planned: planned.module in FAULTS,
    )


def test_a_right_connector_passes_on_a_bad_transport(run_cases: Callable[..., CellRun]) -> None:
    found = faults(run_cases, "Right", "failed not_begun slow not_notified")
    wrong = {name: what for name, what in found.outcomes.items() if what not in ("PASS", "NOT-APPLICABLE")}
    assert not wrong, (wrong, found.findings, found.reasons)
    passed = {name for name, what in found.outcomes.items() if what == "PASS"}
    assert {
        "every_request_ends[failed]",
        "every_request_ends[not_begun]",
        "every_request_ends[not_notified]",
        "attention_kv_arrives[slow]",
        "next_transfer_is_right[failed]",
        "load_ends_with_its_last_transfer",
    } <= passed
    assert found.evidence["every_request_ends[failed]"].notes["failed"] == 1


WRONG = [
    Wrong(
        "HidesItsFailures",
        {"every_request_ends[failed]": "neither as finished nor as failed"},
        variants="failed",
    ),
    Wrong(
        "TakesFailuresForWrites",
        {"every_request_ends[failed]": "a transfer that failed is reported as if it had been made: "},
        variants="failed",
    ),
    Wrong(
        "EndsWithTheFirst",
        on(
            "load_ends_with_its_last_transfer",
            "a load is reported before the last of its transfers has ended",
        ),
        variants="slow",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_mistake_of_the_side_that_writes_is_caught(run_cases: Callable[..., CellRun], wrong: Wrong) -> None:
    found = faults(run_cases, wrong.connector, wrong.variants, SHORT)
    [(case, says)] = wrong.fails.items()
    assert found.outcomes[case] == "FAIL", (found.outcomes, found.reasons)
    assert re.search(says, found.findings[case].diagnosis), found.findings[case]


def test_where_p_writes_a_rank_of_d_is_one_in_so_many_transfers_of_p() -> None:
    one, rest = faults_where_p_writes(
        (Faults(ranks=(1,), transfers=(0,), fail=STATUS), Faults(ranks=(0,), hold=7)), 1, 2
    )
    assert (one.ranks, one.transfers, one.fail) == ((0,), (1,), STATUS)
    assert (rest.ranks, rest.transfers[:3], rest.hold) == ((0,), (0, 2, 4), 7)
    everywhere = (Faults(transfers=(0,), fail=POST), Faults(hold=7))
    assert faults_where_p_writes(everywhere, 1, 2) == everywhere
    assert faults_where_p_writes((Faults(ranks=(1,), hold=7),), 2, 2) == (Faults(ranks=(1,), hold=7),)
