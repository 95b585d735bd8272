"""A connector that waits for metadata of its own workers conforms, and one beside it that is wrong does not.

Cases whose scripted workers say nothing run again with real ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures

HERE = "tests.right_connectors.halves"
ANSWERS = "none_is_followed_by_an_answer"
MEMORY = "memory_of_ended_requests_is_bounded"
BYTES = "attention_kv_arrives"
# What the cases need of D: an answer, the hand-over within a step, a preemption, an abort, a step in flight.
CASES = {
    f"{ANSWERS}[handed_over]",
    "at_most_the_uncomputed_tokens[2b]",
    "call_without_free_blocks_starts_no_load",
    "returns_int_or_none_and_bool[preempted]",
    "every_block_is_freed[d-abort-running]",
    "params_survive_json[p-length]",
    "null_keys_may_be_left_out",
    "requests_end_with_a_step_in_flight[d-length]",
    f"{MEMORY}[d-length]",
    "failed_load_is_reported_once",
}
case_runner, run_cases = fixtures(
    lambda: CaseRunner(f"{HERE}.prefetches", "protocol", ("llama3_1_8b",), "full"),
    lambda case_runner: partial(_run, case_runner),
    scope="module",
)


def _run(case_runner: CaseRunner, connector: str, cases: set[str], tier: str = "protocol") -> CellRun:
    def selected(planned: Any) -> bool:
        variant = "" if planned.variant is None else f"[{planned.variant}]"
        return f"{planned.case.name}{variant}" in cases

    runner = copy.copy(case_runner)
    runner.tier = tier
    declared = {"lease": "kv_lease_duration"}
    return runner.run(connector, "llama3_1_8b", setup="b16", matrix="full", only=selected, declared=declared)


def why(run: CellRun) -> dict[str, Any]:
    return {result.id: result.finding or result.reason for result in run.results if result.evidence is None}


def test_d_may_wait_for_what_its_workers_have_fetched(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("Prefetches", CASES)
    assert run.outcomes == dict.fromkeys(CASES, "PASS"), why(run)
    assert run.evidence["at_most_the_uncomputed_tokens[2b]"].external_tokens == 31


def test_a_fetch_that_fails_lets_d_compute(run_cases: Callable[..., CellRun]) -> None:
    cases = {f"{case}[recomputed]" for case in ("every_request_ends", BYTES, "next_transfer_is_right")}
    run = run_cases("Prefetches", cases, tier="bytes")
    assert run.outcomes == dict.fromkeys(cases, "PASS"), why(run)


@pytest.mark.parametrize(
    ("connector", "tier", "case", "rule"),
    [
        ("AnswersTooSoon", "bytes", f"{BYTES}[n55]", "KV-BYTES-001"),
        ("NeverSaysSo", "protocol", f"{ANSWERS}[handed_over]", "KV-MATCH-006"),
        ("KeepsItsOrders", "protocol", f"{MEMORY}[d-length]", "KV-FINISH-003"),
    ],
)
def test_what_is_wrong_with_it_is_found(
    run_cases: Callable[..., CellRun], connector: str, tier: str, case: str, rule: str
) -> None:
    run = run_cases(connector, {case}, tier=tier)
    assert {case: finding.rule for case, finding in run.findings.items()} == {case: rule}, why(run)


HELD = {
    "request_resumes_when_load_is_reported[late]",
    "request_resumes_when_load_is_reported[backwards]",
    "failed_load_ends_its_request[one_of_two]",
    "failed_load_is_recomputed[request]",
    "aborted_load_frees_blocks_after_its_report[under_way]",
    "load_is_not_ordered_into_freed_blocks[no_hit]",
    "params_are_read_by_key[twice]",
}


def test_a_case_decides_when_a_load_of_real_workers_ends(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("tests.right_connectors.workers:MeetsFirst", HELD)
    assert run.outcomes == dict.fromkeys(HELD, "PASS"), why(run)


def test_a_load_that_no_case_can_hold_is_no_mistake(run_cases: Callable[..., CellRun]) -> None:
    """The scheduler half puts its end into the report when the workers' metadata says so."""
    run = run_cases(f"{HERE}.meetings:MeetsAndReports", HELD | {f"{ANSWERS}[handed_over]"})
    assert run.outcomes["request_resumes_when_load_is_reported[late]"] == "NOT-APPLICABLE", why(run)
    assert run.outcomes[f"{ANSWERS}[handed_over]"] == "PASS", why(run)
    assert set(run.outcomes.values()) == {"PASS", "NOT-APPLICABLE"}, why(run)


def test_blocks_that_p_holds_in_the_pool_of_vllm_are_freed_by_its_workers(
    run_cases: Callable[..., CellRun],
) -> None:
    cases = {
        "every_block_is_freed[p-length]",
        "every_block_is_freed[d-length]",
        "handed_over_blocks_are_kept_until_sent[p-length]",
        "abort_leaves_other_requests_alone[waiting]",
    }
    run = run_cases("tests.wrong_connectors.peers:HoldsInPool", cases)
    assert run.outcomes == dict.fromkeys(cases, "PASS"), why(run)
