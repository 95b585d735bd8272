"""The connector of `kvconform new` in cases that need what its design lacks: a lease, and a living P."""

from __future__ import annotations

from typing import Any

from pytest_kvconform.plan import PlannedCase
from tests.helpers.case_runner import CaseRunner, CellRun

NO_LEASE = {"features": '{"lease": {"unsupported": "P copies its blocks to files at once"}}'}


def run(runner: CaseRunner, case: str, variants: str, declared: dict[str, Any]) -> CellRun:
    def is_it(planned: PlannedCase) -> bool:
        return planned.case.name == case

    return runner.run(
        "MyConnector",
        "llama3_1_8b",
        setup="b16",
        variants=variants,
        config="",
        only=is_it,
        declared=declared,
    )


def test_p_without_a_lease_waits_for_no_notification(my_connector: CaseRunner) -> None:
    """Blocks that P copies at once are not D's business. With a lease D would have to notify P."""
    case = "loads_nothing_if_another_connector_loads"
    assert run(my_connector, case, "first", NO_LEASE).outcomes == {f"{case}[first]": "PASS"}
    [finding] = run(my_connector, case, "first", {}).findings.values()
    assert finding.rule == "KV-HIT-001"
    assert "no step's metadata orders a notification to P" in finding.happened


def test_a_copy_outlives_the_engine_that_made_it(my_connector: CaseRunner) -> None:
    case = "restarted_peer_is_a_new_engine"
    found = run(my_connector, case, "met stranger", {})
    assert found.outcomes == {f"{case}[met]": "PASS", f"{case}[stranger]": "PASS"}
