"""Sleep mode: hooks that vLLM has since 0.33. The rig calls them, so that every minor runs these tests."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pytest_kvconform import plan
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed

ARRIVES = "kv_arrives_after_a_sleep"


@pytest.fixture(scope="module")
def case_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.scheduler.live_connectors", "protocol", ("llama3_1_8b",))
        yield runner
        assert runner.close() == []


@pytest.fixture(autouse=True)
def _minor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has the rules of this minor."""
    monkeypatch.setattr(plan, "version", lambda *names: "0.33.0")


def run(case_runner: CaseRunner, connector: str) -> CellRun:
    return case_runner.run(
        connector, "llama3_1_8b", setup="b16", only=lambda planned: planned.module == "protocol/stress/sleep"
    )


def test_a_connector_that_sleeps_right_passes(case_runner: CaseRunner) -> None:
    found = run(case_runner, "Sleeps")
    assert set(found.outcomes.values()) == {"PASS"}, [
        (result.reason, result.finding) for result in found.results
    ]
    assert len(found.outcomes) == 3


def test_a_connector_that_does_not_support_it_need_not(case_runner: CaseRunner) -> None:
    outcomes = run(case_runner, "Right").outcomes
    assert outcomes.pop("supports_sleep_mode_has_a_truth_value") == "PASS"
    assert set(outcomes.values()) == {"NOT-APPLICABLE"}


@pytest.mark.parametrize(
    ("connector", "fails", "said"),
    [
        ("UnregistersOnce", f"{ARRIVES}[P] {ARRIVES}[D]", r"unregister_kv_caches raised AttributeError"),
        ("StaysAsleep", f"{ARRIVES}[D]", r"did not come to their end: .* WAITING_FOR_REMOTE_KVS"),
        ("PublishesOnce", f"{ARRIVES}[P] {ARRIVES}[D]", r"raised RuntimeError"),
        ("RefusesToForget", f"{ARRIVES}[P] {ARRIVES}[D]", r"reset_cache returned False"),
        ("AnswersByMethod", "supports_sleep_mode_has_a_truth_value", r"is a method"),
    ],
)
def test_a_mistake_is_found_and_named(case_runner: CaseRunner, connector: str, fails: str, said: str) -> None:
    found = run(case_runner, connector)
    assert set(fails.split()) <= found.failed, found.outcomes
    for name in fails.split():
        assert re.search(said, found.findings[name].happened), found.findings[name].happened
