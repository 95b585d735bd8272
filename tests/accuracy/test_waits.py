"""How long servers are waited for that do not answer, and what the processes of a run tell each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.bench import Benches
from pytest_kvconform.rigs.context import CALL_S, REQUEST_S, SHORTER, RunContext, SubjectFacts
from pytest_kvconform.rigs.processes.marks import Marks
from pytest_kvconform.rigs.serving import bench as serving
from pytest_kvconform.rigs.serving.evaluator import Unanswered
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve

A, B, C = (Cell(family, "P1D1") for family in ("llama", "gemma3", "qwen3_5"))
FULL, SHORT = REQUEST_S, REQUEST_S * SHORTER
FACTS = SubjectFacts(
    name="C", module="m", file="", supports_hma=True, vllm="0.32.0", device="cpu", kernels="_C"
)


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    settings = Settings(connector="NixlConnector", report=str(tmp_path))
    return RunContext("", resolve(settings), settings, FACTS, lambda sentence: None)


@pytest.fixture
def bench(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> tuple[serving.ServingBench, list[float]]:
    """A bench whose questions are never answered, and the deadlines with which they were asked."""
    waits: list[float] = []

    def question(context: RunContext, cell: Cell, exam: Any) -> None:
        waits.append(context.deadlines.request)
        raise Unanswered("4 questions to the subject were not answered, the first with TimeoutError")

    one = serving.ServingBench(context)
    monkeypatch.setattr(serving, "require_packages", lambda *names: None)
    monkeypatch.setattr(serving, "why_not_imported", lambda address: "")
    monkeypatch.setattr(one, "_exam", lambda cell: SimpleNamespace(questions=SimpleNamespace(data="")))
    monkeypatch.setattr(one, "_question", question)
    monkeypatch.setattr(one, "_raise_unless_the_connector_failed", lambda *of_the_first: None)
    return one, waits


def test_a_first_wait_is_of_full_length_and_later_ones_are_shorter(
    bench: tuple[serving.ServingBench, list[float]],
) -> None:
    one, waits = bench
    one.observe(A)
    assert waits == [FULL, SHORT]
    one.observe(B)
    assert waits[2:] == [SHORT, SHORT]


def test_what_another_tier_waited_for_makes_no_first_wait_shorter(
    bench: tuple[serving.ServingBench, list[float]], context: RunContext
) -> None:
    one, waits = bench
    context.note("request", True)
    one.observe(A)
    assert waits == [FULL, SHORT]


@pytest.mark.parametrize("known", ["keeping", "hanging"])
def test_a_cell_whose_engines_kept_something_or_hung_is_no_reason_for_others(
    bench: tuple[serving.ServingBench, list[float]], context: RunContext, known: str
) -> None:
    one, waits = bench
    getattr(context, known).add(A)
    one.observe(A)
    assert waits == [SHORT, SHORT]
    one.observe(B)
    assert waits[2:] == [FULL, SHORT]


def test_processes_of_a_run_see_each_others_marks(tmp_path: Path) -> None:
    mine, theirs = Marks(tmp_path / "keeping"), Marks(tmp_path / "keeping")
    assert A not in mine
    assert list(mine) == []
    theirs.add(A)
    theirs.add("request")
    assert A in mine
    assert B not in mine
    assert sorted(mine) == ["llama-P1D1", "request"]
    assert "request" not in Marks(tmp_path / "hanging")


def test_what_one_process_of_a_run_waited_for_another_need_not(context: RunContext, tmp_path: Path) -> None:
    def bench(shared: Path | None) -> Benches:
        return Benches("", context.subject, context.settings, FACTS, lambda sentence: None, shared)

    mine, theirs, alone = bench(tmp_path), bench(tmp_path), bench(None)
    theirs.context.note("request", True)
    theirs.context.keeping.add(A)
    theirs.context.hanging.add(B)
    assert mine.context.deadlines.request == SHORT
    assert A in mine.context.keeping and B in mine.context.hanging
    assert alone.context.deadlines.request == FULL
    assert A not in alone.context.keeping and B not in alone.context.hanging


def test_a_mark_that_cannot_be_written_is_lost(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "gone" / "keeping")  # the run has ended
    marks.add(A)
    assert A not in marks


def test_a_kind_of_wait_may_come_while_deadlines_are_made(context: RunContext) -> None:
    """Another process notes one at any moment."""

    class Growing(set[str]):
        def __iter__(self) -> Iterator[str]:
            found = list(super().__iter__())
            self.add("call")
            return iter(found)

    deadlines = replace(context, in_vain=Growing({"request"})).deadlines
    assert (deadlines.request, deadlines.call) == (SHORT, CALL_S)
