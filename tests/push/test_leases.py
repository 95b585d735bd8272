"""P of a connector that pushes keeps the blocks from which it is writing, also when their lease has ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_kvconform.rigs.cluster.peers import bench
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures

VARIANTS = ("lease_ends_before_load", "lease_ends_during_load", "loading_past_lease")
SCENARIOS = (*VARIANTS, "queued_past_lease")
DURING = "load_after_the_lease_is_detected[lease_ends_during_load]"


def runs_of_leases(case_runner: CaseRunner) -> Callable[[str], CellRun]:
    def run_cases(connector: str) -> CellRun:
        return case_runner.run(
            connector,
            "llama3_1_8b",
            setup="b16",
            matrix="full",
            variants=" ".join(VARIANTS),
            only=lambda planned: planned.module == "protocol/peers/lease",
            declared={"lease": "kv_lease_duration"},
        )

    return run_cases


case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.wrong_connectors.push.mistakes", "protocol", ("llama3_1_8b",), "full"),
    runs_of_leases,
    scope="module",
)


@pytest.fixture(autouse=True)
def few_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run no scenario but these: the others would only take long."""
    of_cell = {name: bench.SCENARIOS["P1D1"][name] for name in SCENARIOS}
    monkeypatch.setattr(bench, "SCENARIOS", {"P1D1": of_cell})


def test_what_is_being_written_from_is_kept_beyond_a_lease(run_cases: Callable[[str], CellRun]) -> None:
    found = run_cases("Right")
    outcomes = set(found.outcomes.values())
    assert "PASS" in outcomes <= {"PASS", "NOT-APPLICABLE", "BLOCKED"}, (found.outcomes, found.findings)
    if found.outcomes[DURING] != "BLOCKED":  # a machine that is too busy for leases of seconds
        assert found.outcomes[DURING] == "NOT-APPLICABLE"
        assert "keeps what it is writing from for longer than a lease" in found.reasons[DURING]


def test_blocks_that_p_frees_while_it_writes_from_them_are_found(run_cases: Callable[[str], CellRun]) -> None:
    found = run_cases("LetsLeasesEnd")
    assert found.outcomes[DURING] == "FAIL", found.reasons
    assert (
        "loaded what P had written there since, and ended without an error" in found.findings[DURING].happened
    )
    assert (
        found.findings[DURING].diagnosis
        == "P frees blocks while it writes from them, and tells D nothing of it"
    )
