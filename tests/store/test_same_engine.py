"""Profile same-engine: one engine saves, loses its blocks and loads; each wrong store is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.result import Blocked, Violation
from pytest_kvconform.rigs.context import SubjectFacts
from pytest_kvconform.rigs.engine.messages import Unfinished
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from pytest_kvconform.suite.bytes import handover
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed

VARIANTS = "n2 n17 n55 two_at_once chunked reused preempted_on_p preempted_on_d hit1"
MODULES = {f"bytes/{name}" for name in ("start", "handover", "pool", "blocks")}


@pytest.fixture(scope="module")
def byte_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.wrong_connectors.store.same_engine", "bytes", ("llama3_1_8b",))
        yield runner
        assert runner.close() == []


@pytest.fixture(scope="module")
def scheduler_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.wrong_connectors.store.same_engine", "protocol", ("llama3_1_8b",))
        yield runner
        assert runner.close() == []


def run_cell(
    runner: CaseRunner,
    store: str,
    variants: str = VARIANTS,
    topology: str = "P1D1",
    setup: str = "b16",
    scale: float = 1.0,
    matrix: str = "quick",
) -> CellRun:
    """The cases about transfers of a cell, on a store of same_engine.py."""
    return runner.run(
        store,
        "llama3_1_8b",
        topology=topology,
        setup=setup,
        profile="same-engine",
        config="",
        variants=variants,
        scale=scale,
        matrix=matrix,
        only=lambda planned: planned.module in MODULES,
    )


def run_keys(runner: CaseRunner, store: str) -> CellRun:
    """The cases about saved prompts and their keys."""
    return runner.run(
        store,
        "llama3_1_8b",
        setup="b16",
        profile="same-engine",
        config="",
        only=lambda planned: planned.module.startswith("protocol/stores/"),
    )


def test_a_right_store_moves_every_byte_in_one_engine(byte_runner: CaseRunner) -> None:
    run = run_cell(byte_runner, "Right")
    assert set(run.outcomes.values()) == {"PASS", "NOT-APPLICABLE"}, run.findings
    declined = {name for name, outcome in run.outcomes.items() if outcome == "NOT-APPLICABLE"}
    assert declined == {"attention_kv_arrives[n2]"}
    assert sum(evidence.bytes_moved for evidence in run.evidence.values()) > 10_000_000


@pytest.mark.parametrize(
    ("cell", "what"),
    [({"topology": "P1D2"}, "differ"), ({"setup": "apart", "matrix": "full"}, "come from two zygotes")],
)
def test_where_one_engine_cannot_be_p_and_d_nothing_applies(
    byte_runner: CaseRunner, cell: dict[str, str], what: str
) -> None:
    run = run_cell(byte_runner, "Right", "n55", **cell)
    assert set(run.outcomes.values()) == {"NOT-APPLICABLE"}
    why = f"Right loads in the engine alone that has saved, and P and D {what}"
    assert set(run.reasons.values()) == {why}


def test_its_keys_are_those_of_vllm(scheduler_runner: CaseRunner) -> None:
    run = run_keys(scheduler_runner, "Right")
    declined = {name for name, outcome in run.outcomes.items() if outcome != "PASS"}
    of_others = {f"other_models_match_nothing[{what}]" for what in ("model", "dtype")}
    assert declined == {*of_others, "prompts_can_be_loaded_while_they_are_saved"}, run.findings
    assert {run.outcomes[name] for name in declined} == {"NOT-APPLICABLE"}


# ---- vLLM's own, and the device that they need -------------------------------------------------------------


@pytest.mark.parametrize(
    ("connector", "config", "asked", "device", "lacks"),
    [
        ("OffloadingConnector", "", False, "cpu", "only on cuda.*--kv-stand-in lets a copy engine"),
        ("OffloadingConnector", "", True, "cpu", ""),
        ("OffloadingConnector", "", False, "cuda", ""),
        ("OffloadingConnector", "TieringOffloadingSpec", False, "cpu", "only on cuda"),
        ("OffloadingConnector", "MySpec", False, "cpu", ""),
        ("SimpleCPUOffloadConnector", "", False, "cpu", "only on cuda.*--kv-stand-in"),
        ("MooncakeConnector", "", False, "cpu", "--kv-stand-in lets the number 0 stand in"),
        ("MooncakeConnector", "", True, "cpu", ""),
        ("HiSparseConnector", "", True, "cpu", "only on cuda, and the installed vLLM runs on cpu$"),
    ],
)
def test_the_configuration_is_read_before_a_gpu_is_asked_for(
    connector: str, config: str, asked: bool, device: str, lacks: str
) -> None:
    given = f'{{"kv_connector_extra_config": {{"spec_name": "{config}"}}}}' if config else ""
    sentence = resolve(Settings(connector=connector, config=given, stand_in=asked)).lacks(device)
    assert re.search(lacks, sentence) if lacks else not sentence


VLLMS = ("OffloadingConnector", "SimpleCPUOffloadConnector")


@pytest.fixture(scope="module")
def copying_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    runner = CaseRunner("", "bytes", ("llama3_1_8b",), stand_in=True)
    yield runner
    assert runner.close() == []


@pytest.mark.parametrize("connector", VLLMS)
def test_vllms_connectors_move_bytes_on_a_cpu(copying_runner: CaseRunner, connector: str) -> None:
    run = run_cell(copying_runner, connector, "n55 two_at_once")
    assert run.outcomes["attention_kv_arrives[n55]"] == "PASS", run.findings
    assert run.evidence["attention_kv_arrives[n55]"].bytes_moved > 1_000_000
    facts: SubjectFacts = copying_runner.known[connector]
    assert facts.stand_in == "a copy engine of this suite in host memory stood in for a GPU's (--kv-stand-in)"


@pytest.mark.parametrize("left", [3, 0])
def test_a_hang_is_blocked_while_the_suites_own_copy_engine_has_copies_to_make(
    monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """A GPU would have made them. With no copy left, nobody but the connector can end the wait."""
    stuck = (Unfinished("P", "RUNNING"),)
    observed = SimpleNamespace(
        stuck=stuck, excuse="", failed=None, request_s=30.0, logged=(), copies_left=left
    )
    monkeypatch.setattr(handover, "observe", lambda bench, transfer: observed)
    bench: Any = SimpleNamespace(facts=SimpleNamespace(stand_in="a copy engine stood in for a GPU's"))
    with pytest.raises(Blocked if left else Violation) as raised:
        handover.completes(bench, None)  # type: ignore[arg-type]
    if left:
        assert str(raised.value).startswith(
            "P's request is RUNNING: a copy engine stood in for a GPU's, and has 3 copies still to make"
        )


def test_a_request_is_preempted_after_its_first_token(byte_runner: CaseRunner) -> None:
    """With asynchronous scheduling the step that computes a token does not return it."""
    run = run_cell(byte_runner, "Right", "preempted_on_d", setup="async")
    assert run.outcomes["completes[preempted_on_d]"] == "PASS", run.findings or run.reasons
