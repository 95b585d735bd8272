"""The finding of a case has the last calls of hooks on P and D, and the one that matters is among them."""

from __future__ import annotations

from collections.abc import Callable

from pytest_kvconform.case_outcome import MOST_CALLS
from pytest_kvconform.result import HookCall
from tests.helpers.case_runner import CellRun


def called(calls: tuple[HookCall, ...], hook: str, side: str) -> list[HookCall]:
    return [call for call in calls if (call.hook, call.side) == (hook, side)]


def test_the_hook_that_raised_is_the_last_one_on_d(run_cases: Callable[..., CellRun]) -> None:
    """Its rank alone saw it, and P had answered before what D was to load."""
    finding = run_cases("RaisesInLoad", "llama", variants="n200").findings["completes[n200]"]
    calls = finding.calls
    assert [call.at for call in calls] == sorted(call.at for call in calls)
    [asked] = called(calls, "get_num_new_matched_tokens", "D")
    [answered] = called(calls, "request_finished_all_groups", "P")
    [ordered] = called(calls, "bind_connector_metadata", "D")
    last = [call for call in calls if call.side == "D"][-1]
    assert (last.hook, last.rank, last.answer) == ("start_load_kv", 0, "raised RuntimeError: the wire is cut")
    assert answered.at < asked.at < ordered.at <= last.at
    assert (asked.rank, asked.given, asked.answer) == (None, "0", "(200, True)")
    assert answered.answer.startswith("(True, {")
    assert asked.requests[0] in ordered.given


def test_steps_in_which_nothing_happens_are_counted(run_cases: Callable[..., CellRun]) -> None:
    """D's load and its end are there, however often D was polled between. The oracle's requests are not."""
    run = run_cases("DropsTail", "llama", variants="n200")
    calls = run.findings["attention_kv_arrives[n200]"].calls
    assert run.findings["outputs_match_the_oracle[n200]"].calls == calls
    [request] = called(calls, "on_new_request", "D")[0].requests
    [loaded] = [call for call in called(calls, "update_connector_output", "D") if call.requests]
    assert loaded.requests == (request,)
    assert max(call.times for call in called(calls, "get_transfer_results", "D")) > 1
    for side in "PD":
        assert 10 < sum(call.side == side for call in calls) <= MOST_CALLS
    assert {call.requests for call in calls if "oracle" in str(call.requests)} == set()
    assert calls[0].at == 0.0
