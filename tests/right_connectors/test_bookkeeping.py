"""Connectors whose records differ from those of NixlConnector pass the cases that could alarm."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_kvconform.case_outcome import CaseEnd
from pytest_kvconform.result import Blocked, Cell, Evidence, Outcome
from pytest_kvconform.subject import resolve
from pytest_kvconform.suite.engine._threads import of_engines
from tests.helpers import case_runner as runner_of_cases
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, fixtures, importable_from, must_be_installed
from tests.helpers.rings import night, some_at_night

GEOMETRIES = ("llama3_1_8b", "gemma3_1b")
MEMORY, ENDS = "memory_of_ended_requests_is_bounded", "every_block_is_freed"
FEW = "plain-length p-length p-abort-running d-length d-failed missing begun"
GROUPS = ("engine_starts_in_vllm_call_order",)  # runs on models with several KV cache groups too
NOTHING_TO_LOAD = "load_is_not_ordered_into_freed_blocks[one_token]"
# Connector -> cases of the scheduler tiers that could alarm.
PROTOCOL = {
    "Tombstones": (
        MEMORY,
        ENDS,
        "abort_leaves_other_requests_alone",
        "corrupted_params_fail_only_their_request",
    ),
    "LongMemory": (MEMORY, "corrupted_params_fail_only_their_request", "memory_of_both_halves_is_bounded"),
    "RemembersLoads": (MEMORY, "corrupted_params_fail_only_their_request"),
    "ForgetsByTime": (MEMORY, ENDS),
    "LevelTriggered": (
        "load_is_not_ordered_into_freed_blocks",
        "freed_blocks_are_in_no_order",
        "metadata_does_not_change_after_its_step",
        MEMORY,
    ),
    "RepeatsSends": ("freed_blocks_are_in_no_order", "metadata_does_not_change_after_its_step", MEMORY),
    "PairsById": ("requests_without_own_params_are_ignored", "freed_blocks_are_in_no_order", MEMORY),
    "RanksInParams": (
        "params_name_the_final_blocks",
        "handed_over_blocks_are_kept_until_sent",
        "aborted_prefill_is_freed_at_once",
        "params_are_read_by_key",
    ),
    "TruthValues": (
        "returns_int_or_none_and_bool",
        "zero_tokens_is_never_async",
        "repeated_call_returns_the_same",
        "returns_bool_and_params",
        "aborted_prefill_is_freed_at_once",
        "handed_over_blocks_are_kept_until_sent",
        "requests_end_with_a_step_in_flight",
        "events_are_taken_once",
        "keeps_only_its_own_blocks",
        "loads_the_same_as_alone",
    ),
    "tests.right_connectors.answers:NoEvents": ("events_are_taken_once",),
    "OwnKeys": (
        "params_survive_json",
        "requests_without_own_params_are_ignored",
        "params_are_read_by_key",
        "params_name_the_final_blocks",
    ),
    "PacksParams": (
        "loads_nothing_if_another_connector_loads",
        "corrupted_params_fail_only_their_request",
        "params_are_read_by_key",
    ),
    "PacksMetadata": (
        "corrupted_params_fail_only_their_request",
        "corrupted_lists_fail_only_their_request",
        "params_are_read_by_key",
        "p_survives_params_of_an_earlier_turn",
    ),
    "NamesRuns": (
        "load_fills_the_allocated_blocks",
        "params_name_the_final_blocks",
        "params_are_read_by_key",
    ),
    "CutsAgain": ("on_new_request_leaves_request_unchanged", "params_name_the_final_blocks"),
    "NoHeartbeat": (
        "p_is_freed_without_a_load",
        "abort_before_the_load_frees_p",
        "load_starts_after_the_local_hit",
    ),
    "KeepsEveryEnd": (
        "abort_leaves_other_requests_alone",
        "every_block_is_freed",
        "keeps_only_its_own_blocks",
        "load_starts_after_the_local_hit",
        "requests_that_end_together_are_all_freed",
        "requests_without_own_params_are_ignored",
        "requests_end_with_a_step_in_flight",
    ),
    "tests.right_connectors.workers:HearsOfEnds": (
        "abort_leaves_other_requests_alone",
        "aborted_prefill_is_freed_at_once",
        "every_block_is_freed",
        "keeps_only_its_own_blocks",
        "load_starts_after_the_local_hit",
        "requests_that_end_together_are_all_freed",
        "requests_without_own_params_are_ignored",
        "requests_end_with_a_step_in_flight",
    ),
    "tests.right_connectors.workers:HearsOfEndsOfD": (
        "abort_leaves_other_requests_alone",
        "every_block_is_freed",
        "keeps_only_its_own_blocks",
        "load_starts_after_the_local_hit",
        "requests_that_end_together_are_all_freed",
    ),
    "DrainsOnAbort": ("aborted_prefill_is_freed_at_once", "abort_leaves_other_requests_alone", ENDS, MEMORY),
}
INTERFACE = {
    "OwnEngineId": ("halves_leave_engine_id_unchanged",),
    "TruthValues": (
        "requires_piecewise_for_cudagraph_answers_any_configuration",
        "capability_properties_have_truth_values",
        "get_loaded_kv_cache_group_ids_names_loaded_groups",
        "optional_hooks_return_their_types",
        "external_cache_hit_sources_add_up",
        "engine_starts_in_vllm_call_order",
    ),
    "tests.right_connectors.answers:NoEvents": ("optional_hooks_return_their_types",),
    "StaticHooks": ("hooks_accept_vllm_arguments", "engine_starts_in_vllm_call_order"),
    "OfOneHalf": (
        "base_class_gets_constructor_arguments",
        "capability_properties_have_truth_values",
        "engine_starts_in_vllm_call_order",
    ),
    "EndsWhenCollected": (
        "no_threads_ports_or_processes_left",
        "shutdown_twice_is_harmless",
        "next_engine_starts_on_same_port",
    ),
    "InUseForAMoment": ("no_threads_ports_or_processes_left", "next_engine_starts_on_same_port"),
    "OneContext": ("no_threads_ports_or_processes_left", "next_engine_starts_on_same_port"),
    "ReplacesItsThread": ("no_threads_ports_or_processes_left", "next_engine_starts_on_same_port"),
    "ReplacesAtLeisure": ("no_threads_ports_or_processes_left", "next_engine_starts_on_same_port"),
    "Tracked": (
        "no_threads_ports_or_processes_left",
        "shutdown_twice_is_harmless",
        "next_engine_starts_on_same_port",
    ),
    "ForksByAServer": ("no_threads_ports_or_processes_left", "next_engine_starts_on_same_port"),
}
case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.right_connectors.bookkeeping", "protocol", GEOMETRIES, "full"),
    lambda case_runner: partial(_run, case_runner),
    scope="module",
)


@pytest.fixture(scope="module")
def with_models() -> Iterator[CaseRunner]:
    """For cases of the tier engine."""
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.right_connectors.bookkeeping", families=("llama", "qwen3_5"))
        yield runner
    assert runner.close() == []


def _run(
    case_runner: CaseRunner,
    tier: str,
    connector: str,
    geometry: str,
    cases: tuple[str, ...],
    matrix: str = "full",
    remembers: int = 0,
) -> CellRun:
    """Run these cases of a tier. Where many requests have to end, of few variants."""
    runner = copy.copy(case_runner)
    runner.tier = tier
    variants = FEW if connector in ("Tombstones", "ForgetsByTime", "LongMemory", "LongerMemory") else ""
    return runner.run(
        connector,
        geometry,
        variants=variants,
        setup="b16",
        matrix=matrix,
        declared={"remembers": remembers},
        only=lambda planned: planned.case.name in cases,
    )


@pytest.mark.parametrize("connector", some_at_night(PROTOCOL, ["RemembersLoads"]))
def test_a_right_scheduler_half_conforms(run_cases: Callable[..., CellRun], connector: str) -> None:
    cases, remembers = PROTOCOL[connector], 500 if connector == "LongMemory" else 0
    _all_pass(run_cases("protocol", connector, "llama3_1_8b", cases, remembers=remembers), cases)


@pytest.mark.parametrize(("connector", "remembers"), [night("LongerMemory", 500), ("LongMemory", 0)])
def test_a_memory_above_what_is_declared_is_a_leak(
    run_cases: Callable[..., CellRun], connector: str, remembers: int
) -> None:
    run = run_cases("protocol", connector, "llama3_1_8b", PROTOCOL["LongMemory"], remembers=remembers)
    found = {finding.rule: finding.happened for finding in run.findings.values()}
    assert set(found) == {"KV-FINISH-003", "KV-PARAMS-002", "KV-MANY-002"}


@pytest.mark.parametrize("connector", ["HearsNothing", "HearsOfEndsOfP"])
def test_workers_that_report_no_end_are_told_from_those_that_do(
    run_cases: Callable[..., CellRun], connector: str
) -> None:
    cases = (
        "abort_leaves_other_requests_alone",
        "keeps_only_its_own_blocks",
        "load_starts_after_the_local_hit",
    )
    name = f"tests.right_connectors.workers:{connector}"
    run = run_cases("protocol", name, "llama3_1_8b", cases, "quick")
    found = {finding.rule: finding.happened for finding in run.findings.values()}
    if connector == "HearsNothing":  # KV-MULTI-002 is about P
        assert found.pop("KV-MULTI-002").endswith("it, nor does a worker half report it")
    assert found.keys() == {"KV-ABORT-001", "KV-FINISH-003"}
    assert "the scheduler still knows" in found["KV-FINISH-003"]


def test_workers_that_cannot_run_here_may_report_ends(
    run_cases: Callable[..., CellRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case that would have to know is blocked, not the first one alone."""
    monkeypatch.setattr(
        runner_of_cases, "resolve", lambda settings: replace(resolve(settings), requires_device="cuda")
    )
    name, cases = "tests.right_connectors.workers:HearsOfEnds", ("abort_leaves_other_requests_alone",)
    run = run_cases("protocol", name, "llama3_1_8b", cases, "quick")
    assert run.failed == set()
    assert list(run.outcomes.values()).count("BLOCKED") > 1
    assert all("moves bytes only on cuda" in reason for reason in run.reasons.values())


@pytest.mark.parametrize("connector", INTERFACE)
def test_a_right_start_and_shutdown_conform(run_cases: Callable[..., CellRun], connector: str) -> None:
    cases = INTERFACE[connector]
    _all_pass(run_cases("interface", connector, "llama3_1_8b", cases), cases)


@pytest.mark.parametrize("connector", ["OneContextAndAThread", "ReplacesOnce"])
def test_a_thread_of_each_engine_is_told_from_those_of_the_process(
    run_cases: Callable[..., CellRun], connector: str
) -> None:
    case = "no_threads_ports_or_processes_left"
    run = run_cases("interface", connector, "llama3_1_8b", (case,))
    assert run.findings[case].rule == "KV-SHUTDOWN-001"
    assert run.findings[case].happened.endswith("there are still 2 threads (poller, poller)"), run.findings[
        case
    ]


@pytest.mark.parametrize("connector", ["TrackedAndAProcess", "LeavesAFork"])
def test_a_process_of_an_engine_is_told_from_those_of_python(
    run_cases: Callable[..., CellRun], connector: str
) -> None:
    case = "no_threads_ports_or_processes_left"
    run = run_cases("interface", connector, "llama3_1_8b", (case,))
    assert run.findings[case].rule == "KV-SHUTDOWN-001"
    assert re.search(r"there are still 1 processes \(\d+ .+\)$", run.findings[case].happened)


@pytest.mark.parametrize(
    ("connector", "left"),
    [
        ("EndsWhenCollected", ""),
        ("InUseForAMoment", ""),
        night("OneContext", ""),
        night("ReplacesItsThread", ""),
        ("ReplacesAtLeisure", ""),
        night("OneContextAndAThread", "after shutdown P still has 2 threads (poller, poller)"),
        ("PoolOfThreads", ""),
        ("ThreadOfEachEngine", "after shutdown P still has 1 threads (poller-1)"),
        night("ThreadEndsLate", "after shutdown P still has 1 threads (poller-1)"),
        night("ReplacesOnce", "after shutdown P still has 1 threads (poller)"),
        ("Tracked", ""),
        ("TrackedAndAProcess", "after shutdown P still has 1 processes (one)"),
        ("ForksByAServer", ""),
        ("LeavesAFork", "after shutdown P still has 1 processes (one)"),
    ],
)
def test_threads_and_processes_of_an_engine_end_with_its_connector(
    with_models: CaseRunner, connector: str, left: str
) -> None:
    run = with_models.run(connector, "llama", only=lambda planned: planned.module == "engine/shutdown")
    assert set(run.outcomes.values()) == {"FAIL" if left else "PASS"}, run.findings
    found = [re.sub(r"\(\d+ .+\)", "(one)", finding.happened) for finding in run.findings.values()]
    assert found == [left] * bool(left)


@pytest.mark.parametrize(
    ("connector", "family", "left"),
    [
        ("PoolForStates", "qwen3_5", ""),
        ("ThreadForStates", "qwen3_5", "after shutdown P still has 1 threads (poller-1)"),
        ("PoolForMany", "llama", ""),
    ],
)
def test_threads_that_some_loads_alone_begin_are_told_apart(
    with_models: CaseRunner, connector: str, family: str, left: str
) -> None:
    connector = f"tests.right_connectors.workers:{connector}"
    run = with_models.run(connector, family, only=lambda planned: planned.module == "engine/shutdown")
    assert set(run.outcomes.values()) == {"FAIL" if left else "PASS"}, (run.findings, run.reasons)
    assert [finding.happened for finding in run.findings.values()] == [left] * bool(left)


def test_threads_that_no_engine_without_a_model_begins_are_not_judged() -> None:
    end = CaseEnd(outcome=Outcome.PASS, evidence=Evidence(looked_at=2, unit="engines", notes={"a": 0}))
    bench: Any = SimpleNamespace(
        cell=Cell("llama", "P1D1"),
        subject=SimpleNamespace(is_store=False),
        scheduler=SimpleNamespace(answer=lambda *_: end),
    )
    with pytest.raises(Blocked, match=r"threads \(b\), .* no engine without a model begins such threads"):
        of_engines(bench, "P", ("b",))
    assert of_engines(bench, "P", ("a", "b")) == ("a",)


@pytest.mark.parametrize("connector", ["TruthValues", "OfOneHalf"])
def test_a_right_start_with_several_groups_conforms(
    run_cases: Callable[..., CellRun], connector: str
) -> None:
    _all_pass(run_cases("interface", connector, "gemma3_1b", INTERFACE[connector]), GROUPS)


def test_a_load_without_a_fixed_number_of_transfers_conforms_in_a_quick_run(
    run_cases: Callable[..., CellRun],
) -> None:
    cases = ("load_ends_with_its_last_transfer",)
    _all_pass(run_cases("bytes", "ReadsNowAndThen", "llama3_1_8b", cases, "quick"), cases)


def _all_pass(run: CellRun, cases: tuple[str, ...]) -> None:
    other = {
        name: outcome
        for name, outcome in run.outcomes.items()
        if outcome != ("NOT-APPLICABLE" if name == NOTHING_TO_LOAD else "PASS")
    }
    assert other == {}, {name: str(run.findings.get(name)) for name in other}
    assert {name.partition("[")[0] for name in run.outcomes} >= set(cases)
