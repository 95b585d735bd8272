"""Several requests of D may load one hand-over, and a hang ends one scenario and not its cell."""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures

SHORT = 0.2  # of deadlines, where one of them has to be waited for
case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.wrong_connectors.push.mistakes", "engine", ("llama",)),
    lambda case_runner: case_runner.run,
    scope="module",
)


def samples(run_cases: Callable[..., CellRun], connector: str, scale: float = 1.0) -> CellRun:
    return run_cases(
        connector, "llama", variants="two_samples two_at_once partial_hit abort_waiting", scale=scale
    )


def test_a_right_connector_serves_all_samples_of_a_prompt(run_cases: Callable[..., CellRun]) -> None:
    found = samples(run_cases, "Right")
    assert found.outcomes["completes[two_samples]"] == "PASS", (found.findings, found.reasons)
    assert not found.failed, found.findings


def test_engines_are_replaced_after_one_has_hung(run_cases: Callable[..., CellRun]) -> None:
    found = samples(run_cases, "ServesOneSample", SHORT)
    assert found.failed == {"completes[two_samples]"}, (found.findings, found.reasons)
    assert "D's request is WAITING_FOR_REMOTE_KVS" in found.findings["completes[two_samples]"].happened
    blocked = {name for name, what in found.outcomes.items() if what == "BLOCKED"}
    assert all("two_samples" in name for name in blocked), found.reasons
