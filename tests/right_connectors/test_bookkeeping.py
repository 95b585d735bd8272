"""Connectors whose records differ from those of NixlConnector pass the cases that could alarm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_kvconform.case_outcome import CaseEnd
from pytest_kvconform.result import Blocked, Cell, Evidence, Outcome
from pytest_kvconform.subject import resolve
from pytest_kvconform.suite.engine._threads import of_engines
from tests.helpers import case_runner as runner_of_cases
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures
from tests.helpers.rings import night

GEOMETRIES = ("llama3_1_8b", "gemma3_1b")
LONG = (
    "memory_of_ended_requests_is_bounded",
    "corrupted_params_fail_only_their_request",
    "memory_of_both_halves_is_bounded",
)
FEW = "plain-length p-length p-abort-running d-length d-failed missing begun"
case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.right_connectors.bookkeeping", "protocol", GEOMETRIES, "full"),
    lambda case_runner: partial(_run, case_runner),
    scope="module",
)


def _run(
    case_runner: CaseRunner,
    tier: str,
    connector: str,
    geometry: str,
    cases: tuple[str, ...],
    matrix: str = "full",
    remembers: int = 0,
) -> CellRun:
    """Run these cases of a tier. Where many requests have to end, of few variants."""
    runner = copy.copy(case_runner)
    runner.tier = tier
    variants = FEW if connector in ("Tombstones", "ForgetsByTime", "LongMemory", "LongerMemory") else ""
    return runner.run(
        connector,
        geometry,
        variants=variants,
        setup="b16",
        matrix=matrix,
        declared={"remembers": remembers},
        only=lambda planned: planned.case.name in cases,
    )


@pytest.mark.parametrize(("connector", "remembers"), [night("LongerMemory", 500), night("LongMemory", 0)])
def test_a_memory_above_what_is_declared_is_a_leak(
    run_cases: Callable[..., CellRun], connector: str, remembers: int
) -> None:
    run = run_cases("protocol", connector, "llama3_1_8b", LONG, remembers=remembers)
    found = {finding.rule: finding.happened for finding in run.findings.values()}
    assert set(found) == {"KV-FINISH-003", "KV-PARAMS-002", "KV-MANY-002"}


@pytest.mark.parametrize("connector", [night("HearsNothing"), night("HearsOfEndsOfP")])
def test_workers_that_report_no_end_are_told_from_those_that_do(
    run_cases: Callable[..., CellRun], connector: str
) -> None:
    cases = (
        "abort_leaves_other_requests_alone",
        "keeps_only_its_own_blocks",
        "load_starts_after_the_local_hit",
    )
    name = f"tests.right_connectors.workers:{connector}"
    run = run_cases("protocol", name, "llama3_1_8b", cases, "quick")
    found = {finding.rule: finding.happened for finding in run.findings.values()}
    if connector == "HearsNothing":  # KV-MULTI-002 is about P
        assert found.pop("KV-MULTI-002").endswith("it, nor does a worker half report it")
    assert found.keys() == {"KV-ABORT-001", "KV-FINISH-003"}
    assert "the scheduler still knows" in found["KV-FINISH-003"]


def test_workers_that_cannot_run_here_may_report_ends(
    run_cases: Callable[..., CellRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case that would have to know is blocked, not the first one alone."""
    monkeypatch.setattr(
        runner_of_cases, "resolve", lambda settings: replace(resolve(settings), requires_device="cuda")
    )
    name, cases = "tests.right_connectors.workers:HearsOfEnds", ("abort_leaves_other_requests_alone",)
    run = run_cases("protocol", name, "llama3_1_8b", cases, "quick")
    assert run.failed == set()
    assert list(run.outcomes.values()).count("BLOCKED") > 1
    assert all("moves bytes only on cuda" in reason for reason in run.reasons.values())


def test_threads_that_no_engine_without_a_model_begins_are_not_judged() -> None:
    end = CaseEnd(outcome=Outcome.PASS, evidence=Evidence(looked_at=2, unit="engines", notes={"a": 0}))
    bench: Any = SimpleNamespace(
        cell=Cell("llama", "P1D1"),
        subject=SimpleNamespace(is_store=False),
        scheduler=SimpleNamespace(answer=lambda *_: end),
        scripts=SimpleNamespace(answer=lambda *_: end),
    )
    with pytest.raises(Blocked, match=r"threads \(b\), .* no engine without a model begins such threads"):
        of_engines(bench, "P", ("b",))
    assert of_engines(bench, "P", ("a", "b")) == ("a",)
