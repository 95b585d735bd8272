"""Profile store: a right store passes, and each wrong one is found and named in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_kvconform.rigs.context import transfer_config
from pytest_kvconform.settings import BadSetting, Settings
from pytest_kvconform.subject import resolve
from pytest_kvconform.suite.bytes import _stores
from tests.helpers.case_runner import OF_VLLM, CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed

DRAFTED = "kimi_k2_5_eagle3"
MODULES = {f"bytes/{name}" for name in ("start", "handover", "pool", "blocks")}


@pytest.fixture(scope="module")
def case_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner(
            "tests.wrong_connectors.store.stores",
            "bytes",
            ("llama3_1_8b", "kimi_linear_48b", DRAFTED),
            "full",
        )
        yield runner
        assert runner.close() == []


@pytest.fixture
def run_cases(case_runner: CaseRunner, tmp_path: Path) -> Callable[..., CellRun]:
    """Run the cases of a cell on a store: run_cases("Right", variants="n55 hit1").

    The store is one of stores.py, or one of vLLM's.
    """

    def run(store: str, family: str = "llama3_1_8b", setup: str = "b16", **more: str) -> CellRun:
        own = store not in OF_VLLM
        return case_runner.run(
            store,
            family,
            setup=setup,
            profile="store" if own else "",
            config=json.dumps({"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}),
            only=lambda planned: planned.module in MODULES,
            **more,
        )

    return run


def reasons(run: CellRun, outcome: str) -> dict[str, str]:
    """Why cases have an outcome, by case."""
    pairs = zip(run.outcomes, run.results, strict=True)
    return {name: result.reason for name, result in pairs if result.outcome == outcome}


def moved(run: CellRun) -> int:
    return sum(evidence.bytes_moved for evidence in run.evidence.values())


def test_a_right_store_passes_every_case(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("Right")
    assert set(run.outcomes.values()) == {"PASS", "NOT-APPLICABLE"}
    declined = reasons(run, "NOT-APPLICABLE")
    assert set(declined) == {f"attention_kv_arrives[{n}]" for n in ("n2", "n15", "n16", "hit3")}
    assert set(declined.values()) == {_stores.SMALL}
    assert moved(run) > 10_000_000
    assert run.outcomes["d_computes_only_missing_tokens[n17]"] == "PASS"
    assert run.outcomes["attention_kv_arrives[preempted_on_d]"] == "PASS"


@pytest.mark.parametrize(
    ("topology", "setup", "matrix"), [("P1D2", "b16", "quick"), ("P1D1", "b16x64", "full")]
)
def test_a_miss_on_an_unlike_engine_is_right(
    run_cases: Callable[..., CellRun], topology: str, setup: str, matrix: str
) -> None:
    run = run_cases("Right", topology=topology, setup=setup, matrix=matrix, variants="n2 n49 n55 n211")
    assert set(run.outcomes.values()) == {"PASS", "NOT-APPLICABLE"}
    assert _stores.UNLIKE in reasons(run, "NOT-APPLICABLE").values()
    assert run.outcomes["engines_start"] == "PASS"
    assert not moved(run)


@pytest.mark.parametrize(
    ("store", "fails"),
    [
        ("tests.right_connectors.stores:WholeBlocks", set()),
        ("DropsWithADraft", set()),
        ("DropsTwoWithADraft", {f"d_loads_all_whole_blocks[{name}]" for name in ("n55", "hit1")}),
    ],
)
def test_with_a_draft_a_store_may_drop_the_last_block(
    run_cases: Callable[..., CellRun], store: str, fails: set[str]
) -> None:
    run = run_cases(store, DRAFTED, topology="P2D2", matrix="quick", variants="n17 n55 hit1")
    assert run.failed == fails, run.findings
    assert moved(run)
    for finding in run.findings.values():
        assert "the end of the last but one whole block" in finding.differs


def test_vllms_example_connector_needs_no_configuration(case_runner: CaseRunner) -> None:
    run = case_runner.run(
        "ExampleConnector",
        "llama3_1_8b",
        variants="n17 n55 hit1",
        setup="b16",
        only=lambda planned: planned.module in MODULES,
    )
    assert run.failed == {"d_loads_all_whole_blocks[n17]", "rest_of_d_pool_is_unchanged[hit1]"}
    assert run.outcomes["attention_kv_arrives[n55]"] == "PASS"
    assert moved(run)


def test_a_family_that_vllm_does_not_start_without_hma(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("ExampleConnector", "kimi_linear_48b", "mla64")
    assert set(run.outcomes.values()) == {"NOT-APPLICABLE"}
    [reason] = set(reasons(run, "NOT-APPLICABLE").values())
    assert reason.startswith(
        "ExampleConnector does not inherit SupportsHMA, "
        "and without it vLLM starts no model with states: ValueError: "
    )


def test_what_needs_a_gpu_is_blocked_with_the_reason(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("OffloadingConnector")
    assert set(run.outcomes.values()) == {"BLOCKED"}
    [reason] = set(reasons(run, "BLOCKED").values())
    assert reason.startswith("OffloadingConnector does not start where vLLM runs on cpu: ")
    assert reason.endswith("CPU Offloading is currently only supported on CUDA-alike and XPU GPUs")


def test_what_is_known_of_vllms_own_stores() -> None:
    subject = resolve(Settings(connector="ExampleConnector"))
    assert (subject.profile, subject.handover) == ("store", "none")
    config = transfer_config(subject, "P", "cpu", folder="here")
    assert (config["kv_role"], config["kv_connector_extra_config"]) == (
        "kv_both",
        {"shared_storage_path": "here"},
    )
    theirs = '{"kv_role": "kv_consumer", "kv_connector_extra_config": {"shared_storage_path": "there"}}'
    config = transfer_config(
        resolve(Settings(connector="ExampleConnector", config=theirs)), "P", "cpu", folder="here"
    )
    assert (config["kv_role"], config["kv_connector_extra_config"]) == (
        "kv_consumer",
        {"shared_storage_path": "there"},
    )
    assert resolve(Settings(connector="NixlConnector")).profile == "p2p"


def test_a_store_hands_nothing_over() -> None:
    with pytest.raises(BadSetting, match="a store hands nothing over"):
        resolve(Settings(connector="stores:Right", profile="store", handover="handoff"))
