"""The finding of a transfer has the last calls of hooks in every rank of P and D."""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers.case_runner import CellRun


def test_each_rank_is_there(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("DropsTail", "llama3_1_8b", topology="P1D2", variants="n55")
    calls = run.findings["attention_kv_arrives[n55]"].calls
    assert {(call.side, call.rank) for call in calls} == {
        ("P", None),
        ("P", 0),
        ("D", None),
        ("D", 0),
        ("D", 1),
    }
    [announced] = [
        call.answer for call in calls if (call.side, call.hook) == ("D", "get_num_new_matched_tokens")
    ]
    assert announced == "(55, True)"
