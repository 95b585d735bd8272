"""What a finding shows of the calls before a failure, and which cases run on fresh engines after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.case_outcome import MOST_CALLS
from pytest_kvconform.result import Blocked, Cell, HookCall
from pytest_kvconform.rigs.cluster.control import DEATHS
from pytest_kvconform.rigs.cluster.model_bench import DEAD_CELLS, INTRODUCTION, EngineBench
from pytest_kvconform.rigs.cluster.observation import Observation
from pytest_kvconform.rigs.context import RunContext, SubjectFacts
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from tests.helpers.case_runner import CellRun

LENGTHS = "n1 n31 n33 n63 n64 n65"
FACTS = SubjectFacts(
    name="C", module="m", file="", supports_hma=True, vllm="0.32.0", device="cpu", kernels="_C"
)

# An engine that keeps nothing and has no processes.
IDLE: Any = SimpleNamespace(kept=None, process=SimpleNamespace(watched=()))


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
    monkeypatch.setattr(bench, "engines", lambda cell, longer: (IDLE, IDLE))
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


def test_a_request_of_p_that_never_ends_is_the_connectors_failure(run_cases: Callable[..., CellRun]) -> None:
    """Without the connector it ends, although the router still tells each engine the address of the other."""
    run = run_cases(
        "tests.wrong_connectors.handovers.rooms:ShortensAView",
        "qwen3_5",
        variants="two_samples",
        scale=0.3,
        declared={"handover": "tests.handovers.proxies:by_room"},
    )
    happened = run.findings["completes[two_samples]"].happened
    assert "P's request is RUNNING" in happened, happened
    assert set(run.outcomes.values()) <= {"FAIL", "BLOCKED", "PASS"}, run.outcomes


def test_two_errors_of_the_suite_without_the_connector_end_a_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(connector="NixlConnector")
    bench = EngineBench(RunContext("", resolve(settings), settings, FACTS, lambda sentence: None))
    facts: Any = None
    failed = Observation(INTRODUCTION, facts, facts, failed=EngineFailed("D", "raised", "D raised"))
    started: list[Cell] = []

    def engines(cell: Cell, longer: int) -> Any:
        started.append(cell)
        return IDLE, IDLE

    def excuse(*scenario: Any) -> str:
        raise KeyError("engine_id")

    monkeypatch.setattr(bench, "engines", engines)
    monkeypatch.setattr(bench, "_observe", lambda *scenario: failed)
    monkeypatch.setattr(bench.control, "excuse", excuse)
    cell = Cell("llama", "P1D1")
    for name in ("one", "another"):
        with pytest.raises(KeyError):
            bench.observe(cell, replace(INTRODUCTION, name=name))
    for _ in range(2):
        with pytest.raises(Blocked, match=r"what ran without the connector ended in KeyError: 'engine_id'$"):
            bench.observe(cell, replace(INTRODUCTION, name="a third"))
    assert started == [cell] * 2


# ---- the last calls of hooks ------------------------------------------------------------------------------


def called(calls: tuple[HookCall, ...], hook: str, side: str) -> list[HookCall]:
    return [call for call in calls if (call.hook, call.side) == (hook, side)]


def test_the_hook_that_raised_is_the_last_one_on_d(run_cases: Callable[..., CellRun]) -> None:
    """Its rank alone saw it, and P had answered before what D was to load."""
    finding = run_cases("RaisesInLoad", "llama", variants="n200").findings["completes[n200]"]
    calls = finding.calls
    assert [call.at for call in calls] == sorted(call.at for call in calls)
    [asked] = called(calls, "get_num_new_matched_tokens", "D")
    [answered] = called(calls, "request_finished_all_groups", "P")
    [ordered] = called(calls, "bind_connector_metadata", "D")
    last = [call for call in calls if call.side == "D"][-1]
    assert (last.hook, last.rank, last.answer) == ("start_load_kv", 0, "raised RuntimeError: the wire is cut")
    assert answered.at < asked.at < ordered.at <= last.at
    assert (asked.rank, asked.given, asked.answer) == (None, "0", "(200, True)")
    assert answered.answer.startswith("(True, {")
    assert asked.requests[0] in ordered.given


def test_steps_in_which_nothing_happens_are_counted(run_cases: Callable[..., CellRun]) -> None:
    """D's load and its end are there, however often D was polled between. The oracle's requests are not."""
    run = run_cases("DropsTail", "llama", variants="n200")
    calls = run.findings["attention_kv_arrives[n200]"].calls
    assert run.findings["outputs_match_the_oracle[n200]"].calls == calls
    [request] = called(calls, "on_new_request", "D")[0].requests
    [loaded] = [call for call in called(calls, "update_connector_output", "D") if call.requests]
    assert loaded.requests == (request,)
    assert max(call.times for call in called(calls, "get_transfer_results", "D")) > 1
    for side in "PD":
        assert 10 < sum(call.side == side for call in calls) <= MOST_CALLS
    assert {call.requests for call in calls if "oracle" in str(call.requests)} == set()
    assert calls[0].at == 0.0
