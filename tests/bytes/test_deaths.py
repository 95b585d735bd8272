"""After a byte engine has died of a transfer, fresh ones run the next, until it is known that all die."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.result import Blocked, Cell
from pytest_kvconform.rigs.cluster.byte_bench import ByteBench
from pytest_kvconform.rigs.cluster.control import DEATHS
from pytest_kvconform.rigs.cluster.transfer import TransferObservation
from pytest_kvconform.rigs.context import RunContext, SubjectFacts
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from tests.helpers.case_runner import CellRun

LENGTHS = "n2 n15 n16 n17 n31 n55"


def completed(run: CellRun) -> dict[str, str]:
    return {name: outcome for name, outcome in run.outcomes.items() if name.startswith("completes[")}


def test_fresh_engines_run_the_transfers_after_a_death(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("RaisesInShortLoad", "llama3_1_8b", variants="n2 n16 n55")
    assert completed(run) == {"completes[n2]": "FAIL", "completes[n16]": "FAIL", "completes[n55]": "PASS"}
    assert run.outcomes["attention_kv_arrives[n55]"] == "PASS"


def test_a_cell_whose_engines_die_again_and_again_is_given_up(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("RaisesInLoad", "llama3_1_8b", variants=LENGTHS)
    ended = completed(run)
    assert list(ended.values()) == ["FAIL"] * DEATHS + ["BLOCKED"] * (len(ended) - DEATHS), run.findings
    assert len(ended) > DEATHS
    assert run.reasons[list(ended)[-1]].startswith("depends on kv::bytes/handover::completes[llama3_1_8b-")


def test_two_errors_of_the_suite_without_the_connector_end_a_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(connector="NixlConnector")
    known = SubjectFacts(name="C", module="m", file="", supports_hma=True, vllm="0.32.0", device="cpu")
    bench = ByteBench(RunContext("", resolve(settings), settings, known, lambda sentence: None))
    engine = SimpleNamespace(process=SimpleNamespace(watched=os.getpid()))
    transfer, facts, started = Transfer("n17", ()), SimpleNamespace(), list[Cell]()
    failed: Any = TransferObservation(transfer, facts, facts, failed=EngineFailed("D", "raised", "D raised"))

    def engines(cell: Cell, *given: Any) -> Any:
        started.append(cell)
        return engine, engine

    def excuse(*given: Any) -> str:
        raise KeyError("engine_id")

    monkeypatch.setattr(bench, "_engines", engines)
    monkeypatch.setattr(bench, "_observe", lambda *given: failed)
    monkeypatch.setattr(bench.control, "excuse", excuse)
    cell = Cell("llama3_1_8b", "P1D1", "b16")
    for name in ("n17", "n31"):
        with pytest.raises(KeyError):
            bench.observe(cell, replace(transfer, name=name), 100)
    for _ in range(2):
        with pytest.raises(Blocked, match=r"what ran without the connector ended in KeyError: 'engine_id'$"):
            bench.observe(cell, replace(transfer, name="n33"), 100)
    assert started == [cell] * 2
