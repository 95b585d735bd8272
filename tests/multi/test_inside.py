"""The subject inside MultiConnector, beside a fake connector: its own failed loads."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.helpers.case_runner import CellRun

FAILED = "failed_load_ends_its_request_alone"
LEASE = '{"kv_connector_extra_config": {"kv_lease_duration": 2}}'
PLACES = ("first", "last")


def run_failing(run_cases: Callable[..., CellRun], connector: str, topology: str = "P1D1") -> CellRun:
    return run_cases(
        connector,
        topology=topology,
        matrix="full",
        variants="",
        config=LEASE,
        only=lambda planned: planned.case.name == FAILED,
    )


@pytest.mark.parametrize(
    ("connector", "says"),
    [
        ("ListsWhatFailed", r"D raised TypeError in get_block_ids_with_load_errors \(multi_connector\.py:"),
        ("FailsNoneBeside", r"request 0 of 20 tokens: rank 0 of D should have the KV of tokens 0 to 18 "),
    ],
)
def test_a_mistake_about_failed_loads_is_found(
    run_cases: Callable[..., CellRun], connector: str, says: str
) -> None:
    run = run_failing(run_cases, f"tests.multi.inside:{connector}")
    assert run.failed == {f"{FAILED}[{place}]" for place in PLACES}, (run.outcomes, run.reasons)
    for finding in run.findings.values():
        assert finding.rule == "KV-MULTI-007"
        assert finding.happened.startswith("inside MultiConnector, "), finding.happened
        assert re.search(says, finding.happened), finding.happened


@pytest.mark.parametrize("topology", ["P1D1", "P1D2"])
@pytest.mark.parametrize(
    "connector",
    [
        "reference_connector:ReferenceConnector",
        "tests.right_connectors.answers:FailsByBlocks",
        "tests.faults.wrong_connectors:Right",
    ],
)
def test_failed_loads_of_right_connectors_end_their_request_alone(
    run_cases: Callable[..., CellRun], connector: str, topology: str
) -> None:
    run = run_failing(run_cases, connector, topology)
    assert run.outcomes == {f"{FAILED}[{place}]": "PASS" for place in PLACES}, (run.findings, run.reasons)


def test_faults_reach_the_connector_that_can_fail_on_demand(run_cases: Callable[..., CellRun]) -> None:
    """It moves bytes without NIXL, and has kvconform_fault: MultiConnector has no such hook."""
    run = run_failing(run_cases, "tests.faults.wrong_connectors:TcpPull")
    assert run.outcomes == {f"{FAILED}[{place}]": "PASS" for place in PLACES}, (run.findings, run.reasons)
