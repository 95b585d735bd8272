"""A package, server, configuration or GPU that is missing: BLOCKED at once, with what to do about it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures

case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.declarations.absent", "bytes", ("llama3_1_8b",), "quick"),
    lambda case_runner: partial(_run, case_runner),
    scope="module",
)
START = ("engine_starts_in_vllm_call_order", "engines_start", "attention_kv_arrives")


def _run(case_runner: CaseRunner, tier: str, connector: str, **more: Any) -> CellRun:
    runner = copy.copy(case_runner)
    runner.tier = tier
    return runner.run(
        connector,
        "llama3_1_8b",
        setup="b16",
        only=lambda planned: planned.case.name in START and planned.module != "bytes/transport_faults",
        **more,
    )


@pytest.fixture
def attempts(case_runner: CaseRunner) -> Iterator[Callable[[], list[str]]]:
    """The halves that were built since the last call."""
    file = case_runner.zygote.run_dir / "attempts"

    def take() -> list[str]:
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines

    take()
    yield take
    take()


@pytest.mark.parametrize(
    ("connector", "sentence"),
    [
        (
            "NeedsAPackage",
            "the package no_such_kv_client is not installed here (pip install no_such_kv_client)",
        ),
        ("NeedsAServer", "no server answers; start it, or configure its address: "),
        ("NeedsAConfiguration", "the environment variable NO_SUCH_KV_CONFIG_PATH is not set"),
        ("NeedsAGpu", "it needs a device that this machine lacks: "),
    ],
)
def test_what_is_missing_blocks(
    run_cases: Callable[..., CellRun], attempts: Callable[[], list[str]], connector: str, sentence: str
) -> None:
    for tier in ("interface", "bytes"):
        run, built = run_cases(tier, connector), attempts()
        assert built and len(built) == len(set(built)), "one attempt"
        reasons = {result.reason for result in run.results}
        assert set(run.outcomes.values()) == {"BLOCKED"}, run.findings
        assert all(reason.startswith(f"{connector} cannot start here: ") for reason in reasons)
        assert all(sentence in reason for reason in reasons)
        assert run.verdict.word == "INCOMPLETE" and run.verdict.exit_code == 10


def test_a_start_that_waits_for_a_server_is_tried_once(
    run_cases: Callable[..., CellRun], attempts: Callable[[], list[str]]
) -> None:
    for tier in ("interface", "bytes"):
        run, built = run_cases(tier, "WaitsForAServer", scale=0.1), attempts()
        assert built and len(built) == len(set(built))
        assert set(run.outcomes.values()) == {"BLOCKED"}, run.findings
        [reason] = {result.reason for result in run.results}
        assert "its start waits for a server: start it, or configure its address" in reason


@pytest.mark.parametrize("connector", ["OneRankWaits", "OneRankSleeps"])
def test_only_a_rank_that_waits_for_a_server_lacks_one(
    run_cases: Callable[..., CellRun], connector: str
) -> None:
    """Meanwhile the engine waits for its ranks, and the other rank for the engine."""
    run = run_cases("bytes", connector, topology="P1D2", variants="n17", scale=0.1)
    if connector == "OneRankWaits":
        assert set(run.outcomes.values()) == {"BLOCKED"}, run.findings
        assert all("its start waits for a server" in result.reason for result in run.results)
    else:
        assert {name.partition("[")[0] for name in run.failed} == {"engines_start"}, run.outcomes
        [finding] = run.findings.values()
        assert "D did not answer within" in finding.happened and "in wait (absent.py" in finding.happened


def test_a_mistake_in_the_constructor_is_a_violation(run_cases: Callable[..., CellRun]) -> None:
    for tier in ("interface", "bytes"):
        run = run_cases(tier, "MakesAMistake")
        assert run.failed and run.verdict.exit_code == 1
        assert all("no_such_attribute" in finding.happened for finding in run.findings.values())
