"""With --kv-timeout-scale every wait inside a case is longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.case_runner import CellRun

LLAMA = "llama3_1_8b"


@pytest.mark.parametrize(("scale", "waited"), [(1.0, 2), (3.0, 6)])
def test_a_start_that_waits_for_ever_is_waited_for(
    run_cases: Callable[..., CellRun], scale: float, waited: int
) -> None:
    case = "start_on_taken_port_does_not_hang"
    run = run_cases("Upstream", LLAMA, scale=scale, only=lambda planned: planned.case.name == case)
    assert run.findings[case].happened.endswith(
        f"still waits in set_xfer_handshake_metadata after {waited} s"
    )


# On a busy machine the suite waits longer, and EndsSlowly would pass with the first scale, too.
@pytest.mark.parametrize(
    ("connector", "scale", "outcome"), [("EndsMuchLater", 1.0, "FAIL"), ("EndsSlowly", 3.0, "PASS")]
)
def test_threads_have_time_to_end_after_shutdown(
    run_cases: Callable[..., CellRun], connector: str, scale: float, outcome: str
) -> None:
    run = run_cases(
        f"tests.wrong_connectors.interface.slow:{connector}",
        LLAMA,
        scale=scale,
        only=lambda planned: planned.case.name == "no_threads_ports_or_processes_left",
    )
    assert run.outcomes == {"no_threads_ports_or_processes_left": outcome}, run.findings
    assert {finding.rule for finding in run.findings.values()} <= {"KV-SHUTDOWN-001"}


def test_a_port_that_is_closed_soon_after_the_end_is_given_back(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("ClosesLate", LLAMA, only=lambda planned: planned.module == "interface/shutdown")
    assert set(run.outcomes.values()) == {"PASS"}, run.findings
    assert run.evidence["next_engine_starts_on_same_port"].notes["ports"] != "none"


def test_an_engine_may_take_longer_to_start_than_a_case_takes(run_cases: Callable[..., CellRun]) -> None:
    case = "engine_starts_in_vllm_call_order"
    run = run_cases(
        "tests.wrong_connectors.interface.slow:StartsSlowly",
        LLAMA,
        scale=0.15,  # a case may take 1.5 s, and a start 13.5 s
        only=lambda planned: planned.case.name == case,
    )
    assert run.outcomes == {f"{case}[{role}]": "PASS" for role in "PD"}, run.findings
