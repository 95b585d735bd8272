"""After an engine has died of a case, fresh engines run the next ones, until it is known that all do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.result import Blocked, Cell
from pytest_kvconform.rigs.context import RunContext, SubjectFacts
from pytest_kvconform.rigs.engine.bench import DEAD_CELLS, INTRODUCTION, EngineBench
from pytest_kvconform.rigs.engine.control import DEATHS
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.observation import Observation
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from tests.helpers.case_runner import CellRun

LENGTHS = "n1 n31 n33 n63 n64 n65"
FACTS = SubjectFacts(
    name="C", module="m", file="", supports_hma=True, vllm="0.32.0", device="cpu", kernels="_C"
)


def test_fresh_engines_run_the_cases_after_a_death(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("RaisesInShortLoad", "llama", variants="n1 n63 n200 two_at_once")
    assert run.failed == {"completes[n1]"}, run.findings
    assert "start_load_kv" in run.findings["completes[n1]"].happened
    blocked = {name for name, outcome in run.outcomes.items() if outcome == "BLOCKED"}
    assert blocked
    assert all("[n1]" in name for name in blocked), blocked
    assert run.outcomes["outputs_match_the_oracle[n200]"] == "PASS"
    assert run.outcomes["no_threads_ports_or_processes_left[two_at_once]"] == "PASS"


def test_a_cell_whose_engines_die_again_and_again_is_given_up(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("RaisesInLoad", "llama", variants=LENGTHS)
    ended = {name: outcome for name, outcome in run.outcomes.items() if name.startswith("completes[")}
    assert list(ended.values()) == ["FAIL"] * DEATHS + ["BLOCKED"] * (len(ended) - DEATHS)
    assert len(ended) > DEATHS
    assert run.reasons[list(ended)[-1]].startswith(
        "an engine of llama-P1D1 failed before: D raised RuntimeError in start_load_kv"
    )


@pytest.mark.parametrize(("how", "reason"), [("raised", ""), ("hung", "engines of 3 cells failed before")])
def test_hangs_in_three_cells_and_not_deaths_keep_other_cells_from_being_tried(
    how: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(connector="NixlConnector")
    bench = EngineBench(RunContext("", resolve(settings), settings, FACTS, lambda sentence: None))
    facts: Any = None
    failed = Observation(INTRODUCTION, facts, facts, failed=EngineFailed("D", how, f"D {how}"))
    monkeypatch.setattr(bench, "engines", lambda cell, longer: (SimpleNamespace(kept=None),) * 2)
    monkeypatch.setattr(bench, "_observe", lambda *scenario: failed)
    monkeypatch.setattr(bench.control, "excuse", lambda *scenario: "")
    cells = [Cell(family, "P1D1") for family in ("llama", "gemma3", "gpt_oss", "deepseek_v3")]
    assert len(cells) == DEAD_CELLS + 1
    for cell in cells[:-1]:
        # after a hang new engines hang in the plainest hand-over, too
        for number in range(DEATHS if how == "raised" else 2):
            bench.observe(cell, replace(INTRODUCTION, name=f"n{number}"))
        with pytest.raises(Blocked, match=f"an engine of {cell} failed before: D {how}"):
            bench.observe(cell, replace(INTRODUCTION, name="another"))
    if reason:
        with pytest.raises(Blocked, match=reason):
            bench.observe(cells[-1], INTRODUCTION)
    else:
        assert bench.observe(cells[-1], INTRODUCTION).failed
