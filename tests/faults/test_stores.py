"""Loads of stores fail on demand: right stores pass, and each wrong one is found by the case about it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_kvconform.suite.bytes._fault_observations import NEEDS_FAULTS
from pytest_kvconform.suite.bytes._stores import UNLIKE
from tests.faults.conftest import MODULES
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed
from tests.helpers.wrong import Wrong

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
        runner = CaseRunner("tests.faults.stores", "bytes", ("llama3_1_8b", "gpt_oss_20b"), "full")
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


def served(*transfers: str) -> dict[str, str]:
    """What is found of loads that have failed and are reported as if they had not."""
    return {
        f"{case}[{transfer}]": says
        for transfer in transfers
        for case, says in (
            ("every_request_ends", "a transfer that failed is reported as if it had been made: no byte of "),
            ("attention_kv_arrives", "no byte of .* was written"),
        )
    }


WRITTEN_LATE = {
    "nothing_is_written_after_a_failed_load[failed]": "while one of its transfers was still under way"
}
WRONG = [
    Wrong("ServesWhatFailed", served("failed", RECOMPUTED), variants=f"failed {RECOMPUTED} slow"),
    Wrong("ServesWhatFailedInMemory", served("failed", RECOMPUTED), variants=f"failed {RECOMPUTED} slow"),
    Wrong("ReportsSuccess", served("failed"), variants="failed slow"),
    Wrong(
        "ReportsNothing",
        {"every_request_ends[failed]": "reported a load neither as finished nor as failed"},
        variants="failed",
        scale=0.2,  # the request is waited for
        blocked=CASES[1:],
    ),
    Wrong(
        "FailsTheOthers",
        {"every_request_ends[failed]": "the failure of one request ends others, too"},
        variants="failed slow",
    ),
    Wrong("WritesAfterFailure", WRITTEN_LATE, variants="failed slow"),
    Wrong("WritesIntoFreedBlocks", WRITTEN_LATE, variants="failed slow"),
    Wrong(
        "NeverEndsASave",
        {
            f"all_blocks_are_freed[{transfer}]": "never reported the end of a save"
            for transfer in ("failed", "slow")
        },
        variants="failed slow",
        scale=0.2,
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_store_is_found(run_store: Callable[..., CellRun], wrong: Wrong) -> None:
    run = run_store(wrong.connector, wrong.variants, wrong.scale)
    assert run.failed == wrong.fails.keys(), run.findings or (run.outcomes, run.reasons)
    for name, pattern in wrong.fails.items():
        assert re.search(pattern, run.findings[name].diagnosis), run.findings[name]
    blocked = {name.partition("[")[0] for name, outcome in run.outcomes.items() if outcome == "BLOCKED"}
    assert blocked == set(wrong.blocked), run.reasons
