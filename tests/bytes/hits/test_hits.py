"""Two loads of a step, one of them with a hit, are told from loads that come alone or without hits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.case_runner import CellRun

BOTH = "hit_of_one"
ARRIVE = f"attention_kv_arrives[{BOTH}]"


@pytest.mark.parametrize(
    ("connector", "words"),
    [
        ("tests.bytes.hits.wrong_connectors:PairsFromTheEnd", "block is off by +1"),
        ("tests.bytes.hits.wrong_connectors:JoinsLoads", "rows of another request"),
    ],
)
def test_a_mistake_about_one_of_two_loads(
    run_cases: Callable[..., CellRun], connector: str, words: str
) -> None:
    run = run_cases(connector, "llama3_1_8b", variants=f"n17 hit1 two_at_once {BOTH}", matrix="quick")
    assert {name.partition("[")[2] for name in run.failed} == {f"{BOTH}]"}, run.findings
    assert run.findings[ARRIVE].rule == "KV-BYTES-001" and words in run.findings[ARRIVE].diagnosis


@pytest.mark.parametrize("connector", ["Right", "tests.right_connectors.sockets:TcpPull"])
def test_a_right_connector(run_cases: Callable[..., CellRun], connector: str) -> None:
    run = run_cases(connector, "llama3_1_8b", variants=BOTH, matrix="quick")
    assert run.failed == set() and run.outcomes[ARRIVE] == "PASS", run.reasons
