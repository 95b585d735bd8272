"""P and D each have the time of a hand-over: what P took is not D's."""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers.case_runner import CellRun


def test_what_p_took_is_not_ds(run_cases: Callable[..., CellRun]) -> None:
    right = "tests.right_connectors.answers:TakesItsTime"
    run = run_cases(right, "llama3_1_8b", variants="n17", scale=0.1)
    assert run.outcomes["completes[n17]"] == run.outcomes["attention_kv_arrives[n17]"] == "PASS", run.findings
