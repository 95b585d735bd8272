"""The finding of a case of the scheduler rig has the last calls on each side, up to the wrong one."""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers.case_runner import CellRun


def only(run_cases: Callable[..., CellRun], connector: str, case: str) -> CellRun:
    name, _, variant = case.partition("[")
    return run_cases(
        connector,
        "llama3_1_8b",
        variants=variant.rstrip("]"),
        only=lambda planned: planned.case.name == name,
    )


def test_a_hook_that_raised_is_the_last_call(run_cases: Callable[..., CellRun]) -> None:
    case = "no_hook_raises[p-abort-running]"
    calls = only(run_cases, "RaisesAtTheEnd", case).findings[case].calls
    last = calls[-1]
    assert (last.side, last.hook) == ("P0", "request_finished_all_groups")
    assert (calls[0].hook, calls[0].answer) == ("__init__", "")
    assert (last.requests, last.answer) == (("cmpl-P0-0000",), "raised KeyError: 'cmpl-P0-0000'")
    assert [call.hook for call in calls if call.side == "P0" and call.requests == last.requests][:3] == [
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
    ]


def test_a_wrong_answer_is_the_last_call(run_cases: Callable[..., CellRun]) -> None:
    """The finding is about D's answer, and P's is before it."""
    case = "at_most_the_uncomputed_tokens[b]"
    finding = only(run_cases, "AnnouncesMore", case).findings[case]
    last = finding.calls[-1]
    assert (last.side, last.hook, last.given) == ("D0", "get_num_new_matched_tokens", "0")
    assert f"returned {last.answer}: " in finding.happened
    assert "P0" in {call.side for call in finding.calls}
