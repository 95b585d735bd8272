"""Faults of a transport are made on the side that writes."""

from __future__ import annotations

from collections.abc import Callable

from pytest_kvconform.rigs.scenario import POST, STATUS, Faults, faults_where_p_writes
from tests.helpers.case_runner import CellRun

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


def test_where_p_writes_a_rank_of_d_is_one_in_so_many_transfers_of_p() -> None:
    one, rest = faults_where_p_writes(
        (Faults(ranks=(1,), transfers=(0,), fail=STATUS), Faults(ranks=(0,), hold=7)), 1, 2
    )
    assert (one.ranks, one.transfers, one.fail) == ((0,), (1,), STATUS)
    assert (rest.ranks, rest.transfers[:3], rest.hold) == ((0,), (0, 2, 4), 7)
    everywhere = (Faults(transfers=(0,), fail=POST), Faults(hold=7))
    assert faults_where_p_writes(everywhere, 1, 2) == everywhere
    assert faults_where_p_writes((Faults(ranks=(1,), hold=7),), 2, 2) == (Faults(ranks=(1,), hold=7),)
