"""vLLM's scheduler reads what update_connector_output makes of a report, and a release may wait for a step.

Wrong connectors beside the right ones are found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures

LEASE = {"lease": "kv_lease_duration"}
RANKS, LEASES = "protocol/peers/rank_reports", "protocol/peers/lease"
ENDS = "abort_at_the_end_of_a_load_frees_blocks[reported]", "abort_at_the_end_of_a_load_frees_blocks[known]"
NOTIFIES = "loads_nothing_if_another_connector_loads[first]"
case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.right_connectors.halves.reports", "protocol", ("llama3_1_8b",), "quick"),
    lambda case_runner: partial(_run, case_runner),
    scope="module",
)


def _run(case_runner: CaseRunner, tier: str, connector: str, *modules: str, **more: Any) -> CellRun:
    runner = copy.copy(case_runner)
    runner.tier = tier
    if modules:
        more["only"] = lambda planned: planned.module in modules
    return runner.run(connector, "llama3_1_8b", setup="b16", **more)


def test_the_scheduler_half_may_put_requests_into_the_report(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("protocol", "ReportsInScheduler", RANKS, LEASES, declared=LEASE)
    assert run.wrong == {}
    passed = {name for name, outcome in run.outcomes.items() if outcome == "PASS"}
    assert {"each_rank_reports_once", "expired_lease_frees_blocks", *ENDS} <= passed, run.reasons


def test_the_scheduler_half_may_take_requests_out_of_the_report(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("protocol", "ParksReports", RANKS, LEASES, declared=LEASE)
    assert run.wrong == {}
    assert run.outcomes["only_waiting_requests_are_reported[P]"] == "PASS"


def test_a_load_that_the_scheduler_half_ends_too_early_is_named_as_such(
    run_cases: Callable[..., CellRun],
) -> None:
    run = run_cases("bytes", "EndsWhatIsOrdered", "bytes/transport_faults", variants="slow")
    finding = run.findings["attention_kv_arrives[slow]"]
    assert finding.rule == "KV-FAIL-007", finding
    assert finding.diagnosis.startswith("a load is reported as soon as its transfers have begun"), finding


KEEPS = {
    "abort_leaves_other_requests_alone[running]",
    "every_block_is_freed[plain-length]",
    "keeps_only_its_own_blocks[fake-first]",
    "requests_without_own_params_are_ignored[p-none]",
}


@pytest.mark.parametrize(
    ("connector", "cases"),
    [
        ("LoadsAgainLater", {"announces_no_freed_blocks_after_the_load[preempted]"}),
        ("BatchesEnds", KEEPS),
    ],
)
def test_workers_and_peers_may_hear_of_an_end_while_the_engine_is_stepped(
    run_cases: Callable[..., CellRun], connector: str, cases: set[str]
) -> None:
    def selected(planned: Any) -> bool:
        return f"{planned.case.name}[{planned.variant}]" in cases

    run = run_cases("protocol", connector, matrix="full", only=selected)
    assert run.outcomes == dict.fromkeys(cases, "PASS"), run.wrong


@pytest.mark.parametrize(
    ("connector", "outcome"), [("BatchesReleases", "PASS"), ("BatchesWhileIdle", "FAIL")]
)
def test_a_release_may_wait_while_the_engine_is_stepped(
    run_cases: Callable[..., CellRun], connector: str, outcome: str
) -> None:
    run = run_cases("protocol", connector, "protocol/multi_connector", variants="first")
    assert run.outcomes[NOTIFIES] == outcome, run.wrong
    if outcome == "FAIL":
        assert run.findings[NOTIFIES].rule == "KV-HIT-001"
