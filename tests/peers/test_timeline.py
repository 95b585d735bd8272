"""The finding about one scenario has the calls about its own requests, though all scenarios run at once."""

from __future__ import annotations

import re

from tests.helpers.case_runner import CaseRunner

from .conftest import LEASE, LEASE_S


def test_a_rank_that_reports_twice_is_seen_to_do_so(case_runner: CaseRunner) -> None:
    run = case_runner.run(
        "RepeatsItself",
        "llama3_1_8b",
        "P1D2",
        setup="b16",
        matrix="full",
        config=LEASE % LEASE_S,
        only=lambda planned: planned.case.name == "each_rank_reports_once",
    )
    [finding] = run.findings.values()
    named = re.search(r"rank 1 of D named request (\S+) 2 times", finding.happened)
    assert named is not None
    reports = [
        call
        for call in finding.calls
        if call.hook == "get_transfer_results" and f"finished_recving: {{'{named[1]}'}}" in call.answer
    ]
    assert {call.rank: call.times for call in reports} == {0: 1, 1: 2}
    assert {call.side[0] for call in reports} == {"D"}  # the engines of scenarios have numbers
    asked = [call for call in finding.calls if call.hook == "get_num_new_matched_tokens"]
    assert named[1] in {id for call in asked for id in call.requests}


def test_the_calls_about_an_aborted_request_are_shown(case_runner: CaseRunner) -> None:
    """The request has no end that the scenario looks at."""
    run = case_runner.run(
        "DropsAborted",
        "llama3_1_8b",
        setup="b16",
        matrix="full",
        config=LEASE % LEASE_S,
        only=lambda planned: planned.case.name == "aborted_load_is_reported_at_its_end",
    )
    [finding] = run.findings.values()
    of_d = [call for call in finding.calls if call.side[0] == "D"]
    aborted = of_d[0].requests  # the first one that D was given
    hooks = [call.hook for call in of_d if call.requests == aborted]
    assert hooks.index("update_state_after_alloc") < hooks.index("request_finished_all_groups")
    [early] = [call for call in of_d if f"finished_recving: {{'{aborted[0]}'}}" in call.answer]
    assert early.hook == "get_transfer_results"
