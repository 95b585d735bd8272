"""Connectors of other designs pass in every rig, and what is declared unsupported is not applicable."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pytest_kvconform.rigs.bench import SubjectFacts, probe_subject
from pytest_kvconform.rigs.context import RunContext, transfer_config
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from tests.helpers.case_runner import PROBE_S, CaseRunner, CellRun
from tests.helpers.fixtures import fixtures
from tests.helpers.rings import night

RENDEZVOUS = {"handover": "rendezvous"}
TRANSFERS = "n17 chunked reused preempted_on_p preempted_on_d hit3 failed not_begun slow"
PEERS = ("protocol/peers/unreachable", "protocol/peers/rank_reports")
case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.right_connectors.designs", "bytes", ("llama3_1_8b",), "quick"),
    lambda case_runner: partial(_run, case_runner),
    scope="module",
)


def _run(case_runner: CaseRunner, tier: str, connector: str, **more: Any) -> CellRun:
    runner = copy.copy(case_runner)
    runner.tier = tier
    return runner.run(connector, "llama3_1_8b", setup="b16", **more)


@pytest.mark.parametrize(
    ("connector", "declared"),
    [
        ("LayerWise", {}),
        ("Rendezvous", RENDEZVOUS),
        ("OwnCache", {}),
        ("tests.right_connectors.answers:FailsByBlocks", {}),
        ("tests.right_connectors.workers:SomeWithinTheStep", {}),
    ],
)
def test_bytes_arrive(run_cases: Callable[..., CellRun], connector: str, declared: dict[str, str]) -> None:
    run = run_cases("bytes", connector, variants=TRANSFERS, declared=declared)
    assert run.wrong == {}
    arrived = {name for name, outcome in run.outcomes.items() if outcome == "PASS"}
    assert {
        "attention_kv_arrives[n17]",
        "attention_kv_arrives[hit3]",
        "next_transfer_is_right[failed]",
    } <= arrived


@pytest.mark.night
def test_peers_of_loads_within_a_step(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("protocol", "LayerWise", only=lambda planned: planned.module in PEERS)
    assert run.wrong == {}
    assert run.outcomes["start_load_kv_does_not_wait_for_p[reading]"] == "PASS"
    assert run.outcomes["unreachable_peer_fails_only_its_request[silent_peer]"] == "PASS"


def test_no_transfer_is_held_of_a_load_within_a_step(run_cases: Callable[..., CellRun]) -> None:
    """The first load is between steps, and the second one, whose transfers were to be held, is not."""
    run = run_cases(
        "protocol",
        "tests.right_connectors.workers:SomeWithinTheStep",
        only=lambda planned: planned.case.name == "each_rank_reports_once",
    )
    assert run.outcomes == {"each_rank_reports_once": "PASS"}, run.wrong


FILLS, FREED = "load_fills_the_allocated_blocks[no_hit]", "load_is_not_ordered_into_freed_blocks[hit]"
SURVIVES = "p_survives_corrupted_params[missing]"
FINAL, CORRUPT = "params_name_the_final_blocks[chunked]", "corrupted_params_fail_only_their_request[flag]"


@pytest.mark.parametrize(
    ("connector", "module", "variants", "passes"),
    [
        ("NamesWholeBlocks", "protocol/request_finished", "", FINAL),
        ("RefusesInTheWorker", "protocol/kv_transfer_params", "missing flag", CORRUPT),
        night(
            "KeepsTheLast", "protocol/kv_transfer_params", "missing", "p_survives_corrupted_params[missing]"
        ),
        ("OrdersInParts", "protocol/matched_tokens", "no_hit starved", FILLS),
        ("OrdersInParts", "protocol/connector_metadata", "hit no_hit d-abort-loading", FREED),
        ("CircuitBreaker", "protocol/aborts", "failed", "abort_leaves_other_requests_alone[failed]"),
    ],
)
def test_choices_of_the_connector(
    run_cases: Callable[..., CellRun], connector: str, module: str, variants: str, passes: str
) -> None:
    """What P names, which half refuses bad params, in how many steps a load is ordered, and whether D loads
    after a failure.
    """
    connector = f"tests.right_connectors.choices:{connector}"
    run = run_cases("protocol", connector, variants=variants, only=lambda planned: planned.module == module)
    assert run.wrong == {} and run.outcomes[passes] == "PASS"


def test_push_work_may_end_with_a_report_of_the_workers(run_cases: Callable[..., CellRun]) -> None:
    connector = "tests.right_connectors.choices:BusyUntilTold"
    run = run_cases("interface", connector, only=lambda one: one.module == "interface/capabilities")
    assert run.wrong == {}
    assert run.outcomes["optional_hooks_return_their_types[D]"] == "PASS"


@pytest.mark.parametrize(
    ("connector", "variants", "keeps"),
    [
        night("TellsOfEnds", "plain-abort-running p-stop d-abort-loading d-hit d-failed d-preempted", ""),
        ("TellsOfEnds", "p-stop", ""),
        ("KeepsTheLast", "p-length", ""),
        ("KeepsWhatItTold", "p-stop d-length d-abort-waiting", "untold.item"),
        night("KeepsBaseIds", "p-length", "bases.item"),
        night("KeepsRecomputed", "d-failed", "computed.item"),
    ],
)
def test_an_end_may_be_remembered_until_own_workers_know_it(
    run_cases: Callable[..., CellRun], connector: str, variants: str, keeps: str
) -> None:
    """They say so in build_connector_worker_meta, and scripted workers do not."""
    connector, case = f"tests.right_connectors.choices:{connector}", "memory_of_ended_requests_is_bounded"
    run = run_cases("protocol", connector, variants=variants, only=lambda one: one.case.name == case)
    outcome = "FAIL" if keeps else "PASS"
    assert run.outcomes == {f"{case}[{ending}]": outcome for ending in variants.split()}, run.wrong
    for finding in run.findings.values():
        assert finding.rule == "KV-FINISH-003" and finding.happened.endswith(f" by now: {keeps}")


def test_d_may_compute_a_prompt_after_a_load_that_failed(run_cases: Callable[..., CellRun]) -> None:
    cases = {"failed_load_is_reported_once", "late_notification_is_ignored"}
    run = run_cases(
        "protocol",
        "tests.right_connectors.choices:CircuitBreaker",
        declared={"lease": "kv_lease_duration"},
        only=lambda planned: planned.case.name in cases,
    )
    assert run.outcomes == dict.fromkeys(cases, "PASS"), run.wrong


@pytest.mark.parametrize(
    ("connector", "words"),
    [
        ("SaysThatItLoaded", "the workers reported a load that was not ordered"),
        ("SaysNothingOfIt", "the request waits for ever"),
    ],
)
def test_workers_that_do_not_refuse_bad_params(
    run_cases: Callable[..., CellRun], connector: str, words: str
) -> None:
    connector = f"tests.right_connectors.choices:{connector}"
    module = "protocol/kv_transfer_params"
    run = run_cases("protocol", connector, variants="flag", only=lambda planned: planned.module == module)
    assert run.findings[CORRUPT].rule == "KV-PARAMS-002" and words in run.findings[CORRUPT].happened


def test_blocks_may_be_held_in_the_pool_of_vllm(run_cases: Callable[..., CellRun]) -> None:
    """The scripted workers of the scheduler rig cannot report for such a connector, and real ones do: see
    halves/test_prefetches.py.
    """
    peers = run_cases(
        "protocol",
        "tests.wrong_connectors.peers:HoldsInPool",
        declared={"lease": "kv_lease_duration"},
        only=lambda one: one.module.startswith("protocol/peers/"),
    )
    assert peers.wrong == {}
    assert peers.outcomes["expired_lease_frees_blocks"] == "PASS"


def test_blocks_that_are_saved_beside_another_connector_are_no_load(
    run_cases: Callable[..., CellRun],
) -> None:
    run = run_cases("protocol", "OwnCache", only=lambda planned: planned.module == "protocol/multi_connector")
    assert run.wrong == {}
    assert run.outcomes["loads_nothing_if_another_connector_loads[first]"] == "PASS"


@pytest.mark.parametrize(
    "connector", ["amount:StagesCopies", "workers:SomeWithinTheStep", "designs:LayerWise"]
)
def test_another_connector_beside_it_changes_nothing(
    run_cases: Callable[..., CellRun], connector: str
) -> None:
    """P of the first one keeps no blocks. The others load within the step, one of them if asked twice."""
    connector, module = f"tests.right_connectors.{connector}", "protocol/multi_connector"
    run = run_cases("protocol", connector, only=lambda planned: planned.module.startswith(module))
    assert run.wrong == {}


def test_blocks_that_it_keeps_of_a_failed_load_of_another_connector_are_no_mistake(
    run_cases: Callable[..., CellRun],
) -> None:
    """vLLM's scheduler frees them with the report of the failed load, and asserts on the one of the end."""
    run = run_cases(
        "protocol",
        "tests.right_connectors.leftovers:KeepsEveryEnd",
        only=lambda planned: str(planned.variant) in ("failed-first", "loaded-last"),
    )
    name = "loads_of_another_connector_are_not_reported"
    assert run.outcomes == {f"{name}[failed-first]": "NOT-APPLICABLE", f"{name}[loaded-last]": "PASS"}


def multi(*connectors: dict[str, Any]) -> str:
    return json.dumps({"kv_connector_extra_config": {"connectors": list(connectors)}})


@pytest.mark.parametrize(("child", "on"), [("NixlConnector", True), ("ExampleConnector", False)])
def test_the_hybrid_allocator_is_asked_as_vllm_asks_it(case_runner: CaseRunner, child: str, on: bool) -> None:
    settings = Settings(
        connector="MultiConnector", config=multi({"kv_connector": child, "kv_role": "kv_both"})
    )
    facts = probe_subject(case_runner.zygote.address, resolve(settings), PROBE_S)
    assert facts.supports_hma is on


def test_a_declared_lease_reaches_the_connectors_inside_multi_connector() -> None:
    own = {"kv_connector": "B", "kv_connector_extra_config": {"kv_lease_duration": 9}}
    settings = Settings(
        connector="MultiConnector", config=multi({"kv_connector": "A"}, own), lease="kv_lease_duration"
    )
    extra = transfer_config(resolve(settings), "P", "cpu", lease_s=3.0)["kv_connector_extra_config"]
    leases = [child["kv_connector_extra_config"]["kv_lease_duration"] for child in extra["connectors"]]
    assert leases == [3.0, 9]
    facts = SubjectFacts(name="", module="", file="", supports_hma=True, vllm="0.32.0", device="cpu")
    assert RunContext("", resolve(settings), settings, facts, print).lease_s(3.0) == 9
