"""Aborts of loads in the engine that has saved: right stores pass, and each wrong one is found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed

CASE = "abort_of_a_load_leaves_others_alone"
WAITING, LOADING = f"{CASE}[waiting]", f"{CASE}[loading]"


@pytest.fixture(scope="module")
def store_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.profiles.stores", "protocol", ("llama3_1_8b",))
        yield runner
        assert runner.close() == []


@pytest.fixture
def run_store(store_runner: CaseRunner, tmp_path: Path) -> Callable[..., CellRun]:
    def run(store: str, profile: str = "store", scale: float = 1.0) -> CellRun:
        return store_runner.run(
            store,
            "llama3_1_8b",
            setup="b16",
            profile=profile,
            scale=scale,
            config=json.dumps({"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}),
            only=lambda planned: planned.case.name == CASE,
        )

    return run


RIGHT = [
    ("tests.right_connectors.stores:WholeBlocks", "store"),
    ("tests.right_connectors.stores:LooksUpInTheBackground", "store"),
    ("tests.right_connectors.stores:WritesBehind", "store"),
    ("tests.right_connectors.stores:WholeBlocks", "same-engine"),
    ("tests.right_connectors.stores:InMemory", "same-engine"),
    ("InMemoryBetweenSteps", "same-engine"),
    ("TakesAWhile", "store"),
]


@pytest.mark.parametrize(("store", "profile"), RIGHT)
def test_a_right_store_passes(run_store: Callable[..., CellRun], store: str, profile: str) -> None:
    run = run_store(store, profile)
    assert run.outcomes == {WAITING: "PASS", LOADING: "PASS"}, run.findings or run.reasons
    assert all(evidence.external_tokens for evidence in run.evidence.values())


KEEPS = "while loading: releases did not come to their end: P keeps blocks"
WRONG = [
    ("ForgetsAbortedLoads", "store", LOADING, KEEPS),
    ("ForgetsAbortedLoadsInMemory", "same-engine", LOADING, KEEPS),
    ("AbortsTheOthers", "store", LOADING, "requests of D did not .*: .* is WAITING_FOR_REMOTE_KVS"),
    ("ExpectsBlocks", "store", WAITING, "while waiting: request_finished raised KeyError"),
]


@pytest.mark.parametrize(("store", "profile", "case", "says"), WRONG, ids=[row[0] for row in WRONG])
def test_a_wrong_store_is_found(
    run_store: Callable[..., CellRun], store: str, profile: str, case: str, says: str
) -> None:
    run = run_store(store, profile, scale=0.2)
    assert run.failed == {case}, (run.findings, run.reasons)
    assert run.findings[case].rule == "KV-ABORT-001"
    assert re.search(says, run.findings[case].happened), run.findings
