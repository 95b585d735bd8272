"""An engine that hangs in a process of its own: its own hook and stack tell whose fault that is."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures

MANY, BOUNDED = "many_loads_in_flight_arrive", "memory_of_both_halves_is_bounded"
OF_P, OF_D = "the process of P's engine", "the process of vLLM's scheduler"
LATE = r"{} did not end within [0-9.]+ s, {} \([a-z]+\.py:\d+\)"
case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.scheduler.live_connectors", "protocol", ("llama3_1_8b",), "full"),
    lambda case_runner: partial(case_runner.run, family="llama3_1_8b", setup="b16", matrix="full"),
    scope="module",
)


@pytest.mark.parametrize(
    ("connector", "case", "scale", "process", "place"),
    [
        ("HangsInAStepOfP", MANY, 0.3, OF_P, "in wait_for_save"),
        ("HangsInAStepOfD", MANY, 0.3, OF_D, "in start_load_kv"),
        ("HangsInGarbageOfP", BOUNDED, 0.3, OF_P, "in garbage collection"),
        ("HangsInTheStartOfP", MANY, 0.1, OF_P, "in __init__ of the worker half"),
    ],
)
def test_an_engine_that_hangs_is_named_with_its_hook(
    run_cases: Callable[..., CellRun], connector: str, case: str, scale: float, process: str, place: str
) -> None:
    """Hooks of the other engine, which steps meanwhile, do not show that the case goes on."""
    run = run_cases(connector, scale=scale, only=lambda planned: planned.case.name == case)
    assert run.outcomes == {case: "FAIL"}, run.reasons
    assert run.findings[case].rule == "KV-HOOK-002"
    assert re.fullmatch(LATE.format(process, place), run.findings[case].happened), run.findings


def test_an_engine_whose_start_waits_for_a_server_lacks_one(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("NeedsAServer", scale=0.1, only=lambda planned: planned.case.name == MANY)
    waits = "its start waits for a server: start it, or configure its address"
    assert run.outcomes == {MANY: "BLOCKED"}, run.findings
    assert run.reasons == {MANY: f"NeedsAServer cannot start here: {waits}"}
