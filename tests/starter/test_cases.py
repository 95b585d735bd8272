"""The connector of `kvconform new` in cases that need what its design lacks: a lease, and a living P."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_kvconform.plan import PlannedCase
from tests.helpers.case_runner import CaseRunner

NO_LEASE = {"features": '{"lease": {"unsupported": "P copies its blocks to files at once"}}'}


def run(runner: CaseRunner, case: str, variants: str, declared: dict[str, Any]) -> dict[str, str]:
    def is_it(planned: PlannedCase) -> bool:
        return planned.case.name == case

    found = runner.run(
        "MyConnector",
        "llama3_1_8b",
        setup="b16",
        variants=variants,
        config="",
        only=is_it,
        declared=declared,
    )
    assert not found.findings or set(found.outcomes.values()) == {"WARNING"}, found.findings
    return found.outcomes


@pytest.mark.parametrize(("declared", "outcome"), [(NO_LEASE, "PASS"), ({}, "WARNING")], ids=["none", "any"])
def test_p_without_a_lease_waits_for_no_notification(
    my_connector: CaseRunner, declared: dict[str, Any], outcome: str
) -> None:
    """Blocks that P copies at once are nobody's business on D. With a lease D would have to notify P."""
    case = "loads_nothing_if_another_connector_loads"
    assert run(my_connector, case, "first", declared) == {f"{case}[first]": outcome}


def test_a_copy_outlives_the_engine_that_made_it(my_connector: CaseRunner) -> None:
    case = "restarted_peer_is_a_new_engine"
    assert run(my_connector, case, "met stranger", {}) == {
        f"{case}[met]": "PASS",
        f"{case}[stranger]": "PASS",
    }
