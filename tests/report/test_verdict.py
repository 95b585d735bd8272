"""`decide_verdict`, the only place that makes a verdict of results."""

from __future__ import annotations

import itertools
import random

import pytest

from pytest_kvconform.result import CaseResult, Evidence, Finding, Outcome
from pytest_kvconform.verdict import EXIT_CODES, decide_verdict

COUNT = itertools.count()


def result(
    outcome: Outcome, module: str = "engine/bytes", moved: int = 5, looked_at: int = 1, **more
) -> CaseResult:
    name = f"kv::{module}::case[llama-P1D1-{next(COUNT):04}]"
    if outcome is Outcome.PASS:
        more.setdefault("evidence", Evidence(looked_at=looked_at, unit="bytes", bytes_moved=moved))
    elif outcome is Outcome.FAIL:
        more.setdefault("finding", Finding(rule="KV-A-001", happened="it happened"))
    else:
        more.setdefault("reason", f"reason of {outcome.value}")
    return CaseResult(id=name, rule="KV-A-001", outcome=outcome, **more)


PASS = result(Outcome.PASS)


@pytest.mark.parametrize(
    ("outcomes", "word"),
    [
        ([], "INCOMPLETE"),
        (["PASS"], "CONFORMS"),
        (["NOT-APPLICABLE"], "INCOMPLETE"),
        (["KNOWN"], "INCOMPLETE"),
        (["PASS", "NOT-APPLICABLE"], "CONFORMS"),
        (["PASS", "NOT-APPLICABLE", "KNOWN"], "CONFORMS-EXCEPT"),
        (["NOT-APPLICABLE", "KNOWN"], "INCOMPLETE"),
        (["PASS", "WARNING"], "CONFORMS"),
        (["PASS", "WARNING", "KNOWN"], "CONFORMS-EXCEPT"),
        (["WARNING"], "INCOMPLETE"),
        (["PASS", "WARNING", "BLOCKED"], "INCOMPLETE"),
        (["PASS", "WARNING", "FAIL"], "VIOLATES"),
        (["PASS", "BLOCKED"], "INCOMPLETE"),
        (["BLOCKED"], "INCOMPLETE"),
        (["PASS", "BLOCKED", "FAIL"], "VIOLATES"),
        (["PASS", "BLOCKED", "FAIL", "HARNESS"], "HARNESS"),
    ],
)
def test_the_worst_decides(outcomes, word):
    results = [result(Outcome(outcome)) for outcome in outcomes]
    for order in itertools.permutations(results):
        verdict = decide_verdict(order, [one.id for one in order])
        assert (verdict.word, verdict.exit_code) == (word, EXIT_CODES[word])
    assert verdict.counts == {outcome: outcomes.count(outcome) for outcome in outcomes}


@pytest.mark.parametrize("worse", ["BLOCKED", "FAIL", "HARNESS"])
def test_one_case_outranks_any_number_of_passes(worse):
    verdict = decide_verdict([*(result(Outcome.PASS) for _ in range(100)), result(Outcome(worse))])
    assert verdict.exit_code == {"BLOCKED": 10, "FAIL": 1, "HARNESS": 11}[worse]


def test_a_case_that_was_selected_and_has_no_result():
    verdict = decide_verdict([PASS], [PASS.id, "kv::engine/bytes::lost[llama-P1D1]"])
    assert verdict.word == "INCOMPLETE"
    assert "1 of 2 cases" in verdict.sentence
    assert "kv::engine/bytes::lost[llama-P1D1]" in verdict.sentence
    assert decide_verdict([], ["kv::a/b::c[d-P1D1]"]).word == "INCOMPLETE"


def test_a_trouble_is_an_error_of_the_harness():
    verdict = decide_verdict([PASS], [PASS.id], ["process 17 would not end"])
    assert verdict.word == "HARNESS"
    assert "process 17" in verdict.sentence


@pytest.mark.parametrize(
    "evidence",
    [None, Evidence(looked_at=0, unit="bytes", bytes_moved=9), Evidence(looked_at=-1, unit="bytes")],
)
def test_a_pass_without_evidence_is_an_error_of_the_harness(evidence):
    assert decide_verdict([result(Outcome.PASS, evidence=evidence)]).word == "HARNESS"


def test_zero_bytes_over_all_cases_that_move_bytes():
    assert decide_verdict([result(Outcome.PASS, moved=0), result(Outcome.PASS, moved=0)]).word == "INCOMPLETE"
    assert decide_verdict([result(Outcome.PASS, moved=0), result(Outcome.PASS, moved=1)]).word == "CONFORMS"
    assert decide_verdict([result(Outcome.PASS, module="interface/names", moved=0)]).word == "CONFORMS"
    mixed = [result(Outcome.PASS, module="interface/names", moved=0), result(Outcome.PASS, moved=0)]
    assert decide_verdict(mixed).word == "INCOMPLETE"


@pytest.mark.parametrize(
    ("module", "word"),
    [("accuracy/evidence", "CONFORMS"), ("engine/handover", "INCOMPLETE"), ("bytes/start", "INCOMPLETE")],
)
def test_loaded_tokens_stand_for_bytes_in_the_accuracy_tier_alone(module, word):
    evidence = Evidence(looked_at=1, unit="questions", external_tokens=100)
    passed = result(Outcome.PASS, module=module, evidence=evidence)
    assert decide_verdict([passed, result(Outcome.PASS, moved=0)]).word == word


def test_causes_group_by_signature():
    def fail(rule, happened, diagnosis="", signature=""):
        return result(
            Outcome.FAIL,
            finding=Finding(rule=rule, happened=happened, diagnosis=diagnosis, signature=signature),
        )

    results = [
        fail("KV-A-001", "a", "late by one"),
        fail("KV-B-001", "b", "late by one"),
        fail("KV-A-001", "c"),
        fail("KV-A-001", "d1", "x1", "x"),
        fail("KV-A-001", "d2", "x2", "x"),
        fail("KV-A-001", "d3", "x3", "x"),
        result(Outcome.BLOCKED),
        result(Outcome.BLOCKED),
    ]
    expected = decide_verdict(results)
    assert [(cause.sentence, cause.rules, len(cause.ids)) for cause in expected.causes] == [
        ("x1", ("KV-A-001",), 3),
        ("late by one", ("KV-A-001", "KV-B-001"), 2),
        ("c", ("KV-A-001",), 1),
        ("reason of BLOCKED", ("KV-A-001",), 2),
    ]
    assert expected.sentence == "6 cases break 2 rules: KV-A-001, KV-B-001"
    random.Random(1).shuffle(results)
    assert decide_verdict(results) == expected


def test_a_failure_without_a_finding_counts():
    assert (
        decide_verdict([result(Outcome.FAIL, finding=None, reason="the case did not reach its end")]).word
        == "VIOLATES"
    )
