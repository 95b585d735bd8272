"""Layer by layer: each layer is judged when its own hook returns, and where no hook is called at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed

AWAITED = "each_layer_is_loaded_when_awaited[two_at_once]"
FOUND, AS_MUCH = "full_graphs_find_loaded_kv[full_graphs]", "full_graphs_save_as_much[full_graphs]"
MODULES = ("bytes/layers", "bytes/handover", "bytes/pool", "bytes/blocks")


@pytest.fixture(scope="module")
def case_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.wrong_connectors.store.layers", "bytes", ("llama3_1_8b",), "quick")
        yield runner
        assert runner.close() == []


@pytest.fixture
def run_cases(case_runner: CaseRunner, tmp_path: Path) -> Callable[..., CellRun]:
    def run(store: str, variants: str = "two_at_once full_graphs") -> CellRun:
        return case_runner.run(
            store,
            "llama3_1_8b",
            setup="b16",
            profile="" if store == "ExampleConnector" else "store",
            config=json.dumps({"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}),
            variants=variants,
            only=lambda planned: planned.module in MODULES,
        )

    return run


@pytest.mark.parametrize("store", ["Right", "LoadsByLayer", "SavesByLayer", "NoLayerHooks"])
def test_a_right_store_passes(run_cases: Callable[..., CellRun], store: str) -> None:
    run = run_cases(store, "two_at_once full_graphs reused n17 n55 hit1")
    assert set(run.outcomes.values()) == {"PASS"}, run.findings
    for case in (AWAITED, FOUND, AS_MUCH):
        assert run.evidence[case].bytes_moved > 1_000_000


def test_the_diagnosis_names_the_layers(run_cases: Callable[..., CellRun]) -> None:
    says = {
        "WaitsForTheLayerBefore": "wait_for_layer_load waits for no layer, or for another than the one that "
        "it names",
        "NeverWaitsForTheLast": "wait_for_layer_load does not wait for the last layer",
        "WaitsInTheFirstOnly": "wait_for_layer_load waits in the first layer only",
    }
    for store, diagnosis in says.items():
        assert run_cases(store, "two_at_once").findings[AWAITED].diagnosis == diagnosis
