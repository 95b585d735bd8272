"""Stores of other designs pass the cases about loads, layers, saved prompts and keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.cluster.scripts.bench import ScriptBench
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.scheduler.bench import SchedulerBench
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed

STORES = ("WholeBlocks", "Evicts", "AsksRankZero", "LooksUpInTheBackground", "WritesBehind")
VARIANTS = "n2 n17 n55 two_at_once chunked reused preempted_on_p preempted_on_d hit1 full_graphs"
MODULE = "tests.right_connectors.stores"


class Everywhere(set[Cell]):
    """Every cell is in it."""

    def __contains__(self, cell: object) -> bool:
        return True


@pytest.fixture(scope="module")
def byte_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner(MODULE, "bytes", ("llama3_1_8b",))
        yield runner
        assert runner.close() == []


@pytest.fixture(scope="module")
def scheduler_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner(MODULE, "protocol", ("llama3_1_8b",))
        yield runner
        assert runner.close() == []


def run(
    runner: CaseRunner,
    store: str,
    modules: tuple[str, ...],
    folder: Path,
    variants: str = "",
    profile: str = "store",
    asks_worker: bool = True,
) -> CellRun:
    return runner.run(
        store,
        "llama3_1_8b",
        setup="b16",
        profile=profile,
        config=json.dumps(
            {
                "kv_connector_extra_config": {
                    "shared_storage_path": str(folder),
                    "lookup_rpc_port": "{engine.port}",
                }
            }
        ),
        variants=variants,
        declared={"asks_worker": asks_worker and store == "AsksRankZero"},
        only=lambda planned: planned.module.startswith(modules),
    )


@pytest.mark.parametrize("store", STORES)
def test_a_right_store_moves_every_byte(byte_runner: CaseRunner, store: str, tmp_path: Path) -> None:
    modules = ("bytes/handover", "bytes/pool", "bytes/blocks", "bytes/layers")
    found = run(byte_runner, store, modules, tmp_path, VARIANTS)
    assert set(found.outcomes.values()) == {"PASS", "NOT-APPLICABLE"}, found.findings
    assert found.outcomes["attention_kv_arrives[reused]"] == "PASS"
    assert found.outcomes["full_graphs_save_as_much[full_graphs]"] == "PASS"
    assert sum(evidence.bytes_moved for evidence in found.evidence.values()) > 10_000_000


@pytest.mark.parametrize("store", STORES)
def test_a_right_store_loads_again_in_the_same_engine(
    byte_runner: CaseRunner, store: str, tmp_path: Path
) -> None:
    modules = ("bytes/handover", "bytes/pool", "bytes/blocks")
    found = run(byte_runner, store, modules, tmp_path, "n55 two_at_once preempted_on_p", "same-engine")
    assert set(found.outcomes.values()) == {"PASS"}, found.findings


@pytest.mark.parametrize("store", STORES)
def test_the_keys_of_a_right_store_are_those_of_vllm(
    scheduler_runner: CaseRunner, store: str, tmp_path: Path
) -> None:
    found = run(scheduler_runner, store, ("protocol/stores/",), tmp_path)
    assert set(found.outcomes.values()) == {"PASS"}, found.findings


@pytest.mark.parametrize("store", STORES)
def test_a_right_store_is_one_of_several_connectors(
    scheduler_runner: CaseRunner, store: str, tmp_path: Path
) -> None:
    found = run(scheduler_runner, store, ("protocol/multi_connector",), tmp_path)
    assert set(found.outcomes.values()) == {"PASS", "NOT-APPLICABLE"}, found.findings
    beside = ("loads_of_another_connector_are_not_reported", "shutdown_ends_both_connectors")
    assert {what for name, what in found.outcomes.items() if name.startswith(beside)} == {"PASS"}


def test_a_store_whose_scheduler_half_asks_a_worker_has_one(
    scheduler_runner: CaseRunner, tmp_path: Path
) -> None:
    modules = ("protocol/matched_tokens", "protocol/request_finished")
    found = run(scheduler_runner, "AsksRankZero", modules, tmp_path)
    assert set(found.outcomes.values()) == {"PASS", "NOT-APPLICABLE"}, found.findings
    assert "PASS" in found.outcomes.values()


def test_a_store_that_saves_later_keeps_blocks_until_it_has(
    scheduler_runner: CaseRunner, tmp_path: Path
) -> None:
    modules = ("protocol/matched_tokens", "protocol/connector_metadata", "protocol/hooks", "protocol/steps")
    found = run(scheduler_runner, "WritesBehind", modules, tmp_path)
    assert set(found.outcomes.values()) == {"PASS", "NOT-APPLICABLE"}, found.findings
    assert found.outcomes["zero_tokens_is_never_async[b+1]"] == "PASS"


def test_saves_may_take_longer_than_the_deadline_of_a_case(
    scheduler_runner: CaseRunner, tmp_path: Path
) -> None:
    """Six waits of 3.2 s are longer than the 18 s that a case has at this scale while hooks are called."""
    found = scheduler_runner.run(
        "WholeBlocks",
        "llama3_1_8b",
        setup="b16",
        scale=0.3,
        profile="store",
        config=json.dumps({"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}),
        declared={"save_delay": 3.2},
        only=lambda planned: planned.case.name == "memory_of_both_halves_is_bounded",
    )
    assert found.outcomes == {"memory_of_both_halves_is_bounded": "PASS"}, (found.reasons, found.findings)


def test_real_workers_of_a_case_save_what_its_second_run_must_not_find(
    scheduler_runner: CaseRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case about asynchronous scheduling runs its requests step by step first."""
    before = SchedulerBench.__init__

    def with_real_workers(self: SchedulerBench, context: RunContext, scripts: ScriptBench) -> None:
        before(self, context, scripts)
        self._own_reports = Everywhere()

    monkeypatch.setattr(SchedulerBench, "__init__", with_real_workers)
    modules = ("protocol/steps/asynchronous_scheduling",)
    found = run(scheduler_runner, "WholeBlocks", modules, tmp_path, "p-length P")
    assert set(found.outcomes.values()) == {"PASS"}, found.findings


def test_without_a_worker_such_a_store_waits_in_vain(scheduler_runner: CaseRunner, tmp_path: Path) -> None:
    modules = ("protocol/request_finished",)
    found = run(scheduler_runner, "AsksRankZero", modules, tmp_path, asks_worker=False)
    assert {finding.rule for finding in found.findings.values()} == {"KV-HOOK-002"}, found.findings


def test_a_process_of_the_suite_is_not_one_of_the_store(tmp_path: Path) -> None:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner(MODULE, "interface", ("llama3_1_8b",))
        found = run(runner, "AsksRankZero", ("interface/shutdown",), tmp_path)
        assert runner.close() == []
    assert set(found.outcomes.values()) == {"PASS"}, found.findings
    assert "no_threads_ports_or_processes_left" in found.outcomes
