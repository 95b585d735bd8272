"""Each case catches the connector that makes its mistake. The right one passes."""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers.case_runner import CellRun

Run = Callable[..., CellRun]
ANSWERED, LOADED = "every_question_is_answered", "each_question_is_loaded"
EQUAL, BYTES = "answers_equal_those_of_d_alone", "moved_bytes_are_counted"


def test_a_right_connector_passes(run_cases: Run) -> None:
    run = run_cases("Right")
    assert not run.failed, run.findings
    assert {run.outcomes[name] for name in (ANSWERED, LOADED, EQUAL, BYTES)} == {"PASS"}
    loaded = run.evidence[LOADED]
    assert loaded.external_tokens > 0
    assert loaded.bytes_moved > 0


def test_a_d_that_computes_everything_has_no_evidence(run_cases: Run, questions: Callable[..., None]) -> None:
    questions(16)
    run = run_cases("LoadsNothing")
    assert run.failed == {LOADED}
    assert "there is no evidence of a hand-over" in run.findings[LOADED].happened
    assert run.outcomes[EQUAL] == "BLOCKED"  # its answers are those of D alone, and show nothing


def test_a_d_that_computes_some_prompts_has_no_evidence_for_these(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(16)
    run = run_cases("LoadsMost")
    assert run.failed == {LOADED}
    assert "the whole prompt of 2 of 16 requests" in run.findings[LOADED].happened
