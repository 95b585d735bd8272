"""Loads of stores fail on demand: right stores pass, and each wrong one is found by the case about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_kvconform.suite.bytes._fault_observations import NEEDS_FAULTS
from pytest_kvconform.suite.bytes._stores import UNLIKE
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed
from tests.wrong_connectors.table.faults import MODULES

RECOMPUTED = "recomputed"  # a load that fails under kv_load_failure_policy=recompute
CASES = (
    "every_request_ends",
    "attention_kv_arrives",
    "nothing_is_written_after_a_failed_load",
    "all_blocks_are_freed",
    "next_transfer_is_right",
)
SAME_ENGINE = ("InMemoryInTheStep", "ServesWhatFailedInMemory")


@pytest.fixture(scope="module")
def store_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner(
            "tests.wrong_connectors.faults.stores", "bytes", ("llama3_1_8b", "gpt_oss_20b"), "full"
        )
        yield runner
        assert runner.close() == []


@pytest.fixture
def run_store(store_runner: CaseRunner, tmp_path: Path) -> Callable[..., CellRun]:
    def run(store: str, variants: str = "", scale: float = 1.0, **cell: str) -> CellRun:
        return store_runner.run(
            store,
            cell.pop("family", "llama3_1_8b"),
            setup="b16",
            matrix="full",
            profile="same-engine" if store in SAME_ENGINE else "store",
            config=json.dumps({"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}),
            variants=variants,
            scale=scale,
            only=lambda planned: planned.module in MODULES,
            **cell,
        )

    return run


@pytest.mark.parametrize("store", ["InTheStep", "BetweenSteps", "InMemoryInTheStep"])
def test_a_right_store_passes(run_store: Callable[..., CellRun], store: str) -> None:
    run = run_store(store)
    assert set(run.outcomes.values()) == {"PASS", "NOT-APPLICABLE"}, run.findings or run.reasons
    passed = {name for name, outcome in run.outcomes.items() if outcome == "PASS"}
    assert {
        f"{case}[{transfer}]" for case in CASES for transfer in ("failed", "not_begun", RECOMPUTED)
    } <= passed
    assert {"load_ends_with_its_last_transfer", "each_transfer_may_fail[later]"} <= passed
    whys = {run.reasons[name] for name in run.outcomes.keys() - passed}
    assert {why.partition(":")[0] for why in whys} == {
        "kvconform_fault has no such fault",
        "a store notifies no peer of the end of a load",
    }


def test_a_store_may_load_nothing_of_an_unlike_engine(run_store: Callable[..., CellRun]) -> None:
    run = run_store("InTheStep", "failed_rank slow_rank", topology="P1D2")
    assert set(run.outcomes.values()) == {"NOT-APPLICABLE"}
    assert set(run.reasons.values()) == {UNLIKE}


def test_without_a_hook_nothing_can_fail(store_runner: CaseRunner, run_store: Callable[..., CellRun]) -> None:
    run = run_store("tests.right_connectors.stores:WholeBlocks", "failed slow")
    assert set(run.outcomes.values()) == {"NOT-APPLICABLE"}
    assert set(run.reasons.values()) == {NEEDS_FAULTS}
