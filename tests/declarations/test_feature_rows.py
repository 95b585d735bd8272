"""The row of a feature in the verdict: declared, observed, and the rule that is broken."""

from __future__ import annotations

import datetime

import msgspec
import pytest

from pytest_kvconform import declaration, features
from pytest_kvconform.apply_declaration import Criteria, apply_again, apply_declaration, feature_results
from pytest_kvconform.result import CaseResult, Cell, Evidence, Finding, Outcome
from pytest_kvconform.verdict import decide_verdict

ALL = dict.fromkeys(features.load(), "")


def result(
    outcome: Outcome, *needs: str, refused: bool = False, moved: int = 1, rule: str = "KV-BYTES-001"
) -> CaseResult:
    given = {
        Outcome.PASS: {"evidence": Evidence(looked_at=1, unit="bytes", bytes_moved=moved)},
        Outcome.FAIL: {"finding": Finding(rule=rule, happened="it happened")},
    }
    name = f"kv::engine/bytes::case[llama-P1D1-{needs}-{outcome}-{refused}]"
    return CaseResult(
        id=name,
        rule=rule,
        outcome=outcome,
        features=needs,
        refused=refused,
        **given.get(outcome, {"reason": "why"}),
    )


SHOULD = "KV-BYTES-009"
PASS, FAIL, BLOCKED = Outcome.PASS, Outcome.FAIL, Outcome.BLOCKED


@pytest.mark.parametrize(
    ("why", "results", "observed", "rule"),
    [
        ("", [result(PASS, "mla")], "works", ""),
        ("", [result(PASS, "mla"), result(FAIL, "mla", refused=True)], "works", ""),
        ("", [result(PASS, "mla"), result(FAIL, "mla")], "fails", ""),
        ("", [result(FAIL, "mla", refused=True)], "refused", "KV-DECLARE-001"),
        ("", [result(BLOCKED, "mla", refused=True)], "refused", "KV-DECLARE-001"),
        ("", [result(BLOCKED, "mla")], "blocked", ""),
        ("", [result(PASS, "mla", moved=0)], "not looked at", ""),
        ("", [result(PASS, "abort", moved=0)], "not looked at", ""),
        ("", [], "not looked at", ""),
        ("why", [result(FAIL, "mla", refused=True)], "refused", ""),
        ("why", [result(PASS, "mla")], "works", "KV-DECLARE-002"),
        ("why", [result(PASS, "mla", moved=0), result(FAIL, "mla", refused=True)], "refused", ""),
        ("why", [result(PASS, "mla"), result(FAIL, "mla")], "fails", "KV-DECLARE-003"),
        ("why", [], "not looked at", ""),
        (None, [result(PASS, "mla")], "works", ""),
        # other rules show nothing about a kind of layers, and neither does the fate of a request
        ("", [result(PASS, "mla"), result(FAIL, "mla", rule="KV-PEER-001")], "works", ""),
        ("", [result(PASS, "mla"), result(FAIL, "mla", "abort")], "works", ""),
        ("", [result(PASS, "mla"), result(FAIL, "mla", "prefix-hit")], "fails", ""),
        ("", [result(FAIL, "mla", rule="KV-PEER-001")], "not looked at", ""),
        ("why", [result(FAIL, "mla", rule="KV-PEER-001")], "fails", "KV-DECLARE-003"),
        # a SHOULD
        ("", [result(PASS, "mla"), result(FAIL, "mla", rule=SHOULD)], "works", ""),
        ("why", [result(FAIL, "mla", refused=True), result(FAIL, "mla", rule=SHOULD)], "refused", ""),
    ],
)
def test_observed(why, results, observed, rule):
    criteria = Criteria(features=ALL | {"mla": why} if why is not None else {}, should=(SHOULD,))
    [row] = [
        row
        for row in feature_results([apply_declaration(one, criteria) for one in results], criteria)
        if row.name == "mla"
    ]
    assert (row.observed, row.rule) == (observed, rule)
    assert row.declared == {"": "supported", None: "undeclared"}.get(why, "unsupported")


@pytest.mark.parametrize(
    "rule", ["KV-LIFE-004", "KV-FINISH-003", "KV-SIDE-001", "KV-HOOK-001", "KV-PARAMS-001"]
)
def test_a_taken_port_or_a_leak_shows_nothing_about_attention(rule):
    every = features.load()
    results = [result(PASS, "full-attention"), result(FAIL, "full-attention", rule=rule)]
    criteria = Criteria(features=dict.fromkeys(every, ""))
    rows = {row.name: row.observed for row in feature_results(results, criteria)}
    assert rows["full-attention"] == "works"
    assert feature_results(results[1:], criteria)[0].observed == "not looked at"
    broken = [result(FAIL, "full-attention", rule="KV-BYTES-001")]
    assert feature_results(broken, criteria)[0].observed == "fails"


@pytest.mark.parametrize(("declared", "outcome"), [("", FAIL), ("why", Outcome.NOT_APPLICABLE)])
def test_what_cannot_be_refused_is_not_judged_if_it_is_unsupported(declared, outcome):
    """A connector does not learn that it is one of several."""
    criteria = Criteria(features=ALL | {"multi-connector": declared})
    cases = [result(one, "multi-connector", rule="KV-MULTI-001") for one in (FAIL, PASS)]
    applied = [apply_declaration(one, criteria) for one in cases]
    assert [one.outcome for one in applied] == [outcome, outcome if declared else PASS]
    [row] = [row for row in feature_results(applied, criteria) if row.name == "multi-connector"]
    assert row.rule == ""
    ours = apply_declaration(result(Outcome.HARNESS, "multi-connector"), criteria)
    assert ours.outcome is Outcome.HARNESS


def test_an_ability_of_the_case_itself_needs_no_bytes():
    criteria = Criteria(features=ALL | {"abort": "why"})
    [row] = [
        row
        for row in feature_results([result(PASS, "abort", "mla", moved=0)], criteria)
        if row.name == "abort"
    ]
    assert (row.observed, row.rule) == ("works", "KV-DECLARE-002")


def test_one_feature_is_not_blamed_for_another():
    criteria = Criteria(features=ALL | {"tp-heterogeneous": "why"})
    results = [result(FAIL, "mla", "tp-heterogeneous"), result(PASS, "mla")]
    rows = {
        row.name: row.observed
        for row in feature_results([apply_declaration(one, criteria) for one in results], criteria)
    }
    assert (rows["mla"], rows["tp-heterogeneous"]) == ("works", "fails")
    criteria = Criteria(features=ALL | {"tp-heterogeneous": "why", "layout-heterogeneous": "why"})
    results = [result(FAIL, "mla", "tp-heterogeneous", "layout-heterogeneous", refused=True)]
    rows = {
        row.name: row.observed
        for row in feature_results([apply_declaration(one, criteria) for one in results], criteria)
    }
    assert (rows["mla"], rows["tp-heterogeneous"], rows["layout-heterogeneous"]) == (
        "not looked at",
        "refused",
        "refused",
    )


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("why", ["", "why"])
def test_applying_a_declaration_again_changes_nothing(outcome, refused, why):
    entry = declaration.KnownFailure(
        case="kv::*", issue="https://e.org/1", expires=datetime.date(2100, 1, 1), reason="r"
    )
    for known in ((), (entry,)):
        for claim in (False, True):
            criteria = Criteria(features=ALL | {"mla": why}, known=known, claim=claim)
            once = apply_declaration(result(outcome, "mla", refused=refused), criteria)
            assert apply_again(once, criteria) is once
            assert decide_verdict([once], [once.id], (), criteria).counts == {once.outcome.value: 1}


def test_a_known_failure_that_expired_at_midnight_is_one_no_longer():
    """As in a merged run, of whose shards one ran before midnight and one after it."""
    entry = declaration.KnownFailure(
        case="kv::*", issue="https://e.org/1", expires=datetime.date(2026, 5, 1), reason="r"
    )
    before, after = (
        Criteria(features=ALL, known=(msgspec.structs.replace(entry, state=state),))
        for state in ("open", "expired")
    )
    known = apply_declaration(result(FAIL, "mla"), before)
    assert known.outcome is Outcome.KNOWN
    failed = apply_again(known, after)
    assert (failed.outcome, failed.case_outcome) == (FAIL, None)
    assert failed == apply_declaration(result(FAIL, "mla"), after)
    assert "has expired" in failed.reason


@pytest.mark.parametrize(
    ("depends_on", "needs", "outcome"),
    [
        ("kv::bytes/handover::completes[llama-P1D1-n63]", "abort", "NOT-APPLICABLE"),
        ("kv::bytes/start::engines_start[llama-P1D1]", "mla", "NOT-APPLICABLE"),
        ("kv::bytes/start::engines_start[llama-P1D1]", "abort", "BLOCKED"),
        ("llama-P1D1", "mla", "NOT-APPLICABLE"),
        ("llama-P1D1", "abort", "BLOCKED"),
        ("", "mla", "BLOCKED"),
    ],
)
@pytest.mark.parametrize("reason", ["it died", "depends on kv::a/b::d"])
def test_what_an_unsupported_feature_blocks_is_not_applicable(depends_on, needs, outcome, reason):
    one = CaseResult(
        id="kv::a/b::c",
        rule="KV-A-001",
        outcome=BLOCKED,
        cell=Cell("llama", "P1D1"),
        features=(needs,),
        reason=reason,
        depends_on=depends_on,
    )
    for why, expected in (("why", outcome), ("", "BLOCKED")):
        criteria = Criteria(features=ALL | {needs: why})
        once = apply_declaration(one, criteria)
        assert once.outcome == expected
        assert once.reason.endswith(reason)
        assert apply_again(once, criteria) is once
        assert decide_verdict([once], [once.id], (), criteria).counts == {expected: 1}


@pytest.mark.parametrize(
    ("cell", "outcome", "observed", "rule"),
    [
        (Cell("gemma3_1b", "P1D2", "b16"), "NOT-APPLICABLE", "not looked at", ""),  # one KV head
        (Cell("deepseek_v3", "P1D2", "b16"), "NOT-APPLICABLE", "not looked at", ""),  # latent attention
        (Cell("kimi_k2_5_eagle3", "P1D2", "b16"), "WARNING", "works", "KV-DECLARE-002"),  # heads of the draft
        (Cell("llama", "P1D2"), "WARNING", "works", "KV-DECLARE-002"),
        (Cell("kimi_linear", "P1D2"), "WARNING", "works", "KV-DECLARE-002"),  # states
    ],
    ids=str,
)
def test_unequal_sizes_that_split_nothing_show_no_hidden_ability(
    cell: Cell, outcome: str, observed: str, rule: str
) -> None:
    criteria = Criteria(features=ALL | {"tp-heterogeneous": "ranks overwrite each other"})
    passed = msgspec.structs.replace(result(PASS, "tp-heterogeneous"), cell=cell)
    applied = apply_declaration(passed, criteria)
    [row] = [row for row in feature_results([applied], criteria) if row.name == "tp-heterogeneous"]
    assert (applied.outcome, row.observed, row.rule) == (outcome, observed, rule)
    assert apply_again(applied, criteria) is applied


def test_unequal_sizes_that_split_nothing_must_not_fail() -> None:
    criteria = Criteria(features=ALL | {"tp-heterogeneous": "ranks overwrite each other"})
    failed = result(FAIL, "tp-heterogeneous")
    applied = apply_declaration(
        msgspec.structs.replace(failed, cell=Cell("deepseek_v3", "P1D2", "b16")), criteria
    )
    assert (applied.outcome, applied.declaration_rule) == (FAIL, "KV-DECLARE-003")


def test_a_feature_that_no_case_could_test_is_missed_unless_cases_were_left_out() -> None:
    results = [result(PASS, "mla"), result(Outcome.NOT_APPLICABLE, "abort")]
    criteria = Criteria(features=ALL | {"abort": ""})
    assert decide_verdict(results, None, (), criteria).word == "INCOMPLETE"
    criteria = msgspec.structs.replace(criteria, left_out_features=("abort",))
    assert decide_verdict(results, None, (), criteria).word == "CONFORMS"
    [row] = [row for row in feature_results(results, criteria) if row.name == "abort"]
    assert row.observed == "not selected"
