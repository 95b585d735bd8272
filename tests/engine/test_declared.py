"""A feature that is declared unsupported, on real engines: refused, crashed, wrong, or able after all."""

from __future__ import annotations

import copy

import msgspec
import pytest

from pytest_kvconform import features
from pytest_kvconform.apply_declaration import Criteria, apply_declaration
from pytest_kvconform.verdict import decide_verdict
from tests.helpers.case_runner import CaseRunner

UNEQUAL = "tp-heterogeneous"
CRITERIA = Criteria(features=dict.fromkeys(features.load(), "") | {UNEQUAL: "one rank only"})

# connector -> what its cases become where P has one rank and D two; observed; rule
# of the declaration that is broken
ENDS = {
    "Declines": ({"NOT-APPLICABLE"}, "refused", ""),
    "GivesUp": ({"NOT-APPLICABLE"}, "refused", ""),
    "Dies": ({"FAIL", "NOT-APPLICABLE"}, "fails", "KV-DECLARE-003"),
    "Corrupts": ({"FAIL", "NOT-APPLICABLE"}, "fails", "KV-DECLARE-003"),
    "Works": ({"NOT-APPLICABLE", "WARNING"}, "works", "KV-DECLARE-002"),
}


@pytest.mark.parametrize("connector", ENDS)
def test_unsupported(case_runner: CaseRunner, connector: str) -> None:
    mine = copy.copy(case_runner)
    mine.module = "tests.wrong_connectors.engine.declining"
    results = mine.run(connector, "llama", "P1D2", variants="n64 n200 abort_loading").results
    outcomes, observed, rule = ENDS[connector]
    applied = [apply_declaration(result, CRITERIA) for result in results]
    assert {result.outcome.value for result in applied} == outcomes
    verdict = decide_verdict(applied, None, (), CRITERIA)
    [row] = [row for row in verdict.features if row.name == UNEQUAL]
    assert (row.declared, row.observed, row.rule) == ("unsupported", observed, rule)
    # no case that passes is left
    assert verdict.word == ("VIOLATES" if rule == "KV-DECLARE-003" else "INCOMPLETE")
    if rule == "KV-DECLARE-003":
        assert {result.declaration_rule for result in applied if result.outcome == "FAIL"} == {rule}
    claim = decide_verdict(applied, None, (), msgspec.structs.replace(CRITERIA, claim=True))
    assert claim.word == ("INCOMPLETE" if connector in ("Declines", "GivesUp", "Works") else "VIOLATES")


def test_supported_and_refused(case_runner: CaseRunner) -> None:
    mine = copy.copy(case_runner)
    mine.module = "tests.wrong_connectors.engine.declining"
    results = mine.run("Declines", "llama", "P1D2", variants="n64").results
    verdict = decide_verdict(results, None, (), Criteria(features=dict.fromkeys(features.load(), "")))
    assert (verdict.word, verdict.counts["FAIL"]) == ("VIOLATES", 1)
    assert "KV-START-001" in verdict.sentence
    [row] = [row for row in verdict.features if row.name == UNEQUAL]
    assert (row.observed, row.rule) == ("refused", "KV-DECLARE-001")
