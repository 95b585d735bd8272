"""Application of the declaration to the result of each case, and the observation of each declared feature.

| declared | the connector | outcome |
|---|---|---|
| unsupported | declines cleanly | NOT-APPLICABLE |
| unsupported | works | WARNING (KV-DECLARE-002); a claim is then INCOMPLETE |
| unsupported | delivers wrong bytes, dies or hangs | FAIL (KV-DECLARE-003) |
| tp-heterogeneous unsupported | works where each rank has the KV of all heads | NOT-APPLICABLE |
| unsupported, and it cannot refuse | passes or fails | NOT-APPLICABLE |
| supported | declines | FAIL under the rule of the case, and KV-DECLARE-001 for the feature |
| unsupported | fails so that other cases cannot run | these other cases: NOT-APPLICABLE |
| known failure | fails | KNOWN |

Whatever is declared: a FAIL that breaks a rule of strength SHOULD becomes WARNING. A warning stays one if a
known failure matches it; the reason then names the issue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pytest_kvconform import features
from pytest_kvconform.declaration import KnownFailure
from pytest_kvconform.result import CaseResult, Finding, Outcome

REFUSED_THOUGH_SUPPORTED = "KV-DECLARE-001"
WORKS_THOUGH_UNSUPPORTED = "KV-DECLARE-002"
WRONG_THOUGH_UNSUPPORTED = "KV-DECLARE-003"
UNEQUAL_SIZES = "tp-heterogeneous"
_START = "engines_start"  # the case on which all cases of a cell depend
# "not selected": no case that ran tests the feature, and cases that were left out need it
Observed = Literal["works", "fails", "refused", "blocked", "not looked at", "not selected"]


class Criteria(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the verdict of a run besides the results of its cases."""

    features: dict[str, str]  # declared: name -> why it is not supported, "" if it is supported
    known: tuple[KnownFailure, ...] = ()
    claim: bool = False  # the run must be complete: nothing left out, no hidden ability, no known failure
    left_out: int = 0  # cases of the manifest that were not selected, for no shard
    left_out_features: tuple[str, ...] = ()  # that a case needs which was not selected for this shard
    known_features: tuple[str, ...] = ()  # the closed list of the suite that made the run; (): this one's
    shard: str = ""  # which part of the run the results are, "2/4"; "": all of it
    should: tuple[str, ...] = ()  # ids of the rules of strength SHOULD: who breaks one gets a warning


class FeatureResult(msgspec.Struct, frozen=True, kw_only=True):
    """One feature of the list: what was declared, and what the cases showed."""

    name: str
    declared: Literal["supported", "unsupported", "undeclared"]
    reason: str = ""  # why it is not supported
    observed: Observed
    cases: int  # that need the feature
    passed: int  # of these cases, before the declaration is applied
    rule: str = ""  # KV-DECLARE rule that the declaration breaks
    sentence: str = ""  # how the declaration breaks the rule


def apply_declaration(result: CaseResult, criteria: Criteria) -> CaseResult:
    """Return the result of a case, as the case ended, after the declaration is applied to it."""
    applied = _apply_unsupported(result, criteria)
    if applied.outcome is not Outcome.FAIL:
        return applied
    warns = broken_rule(applied) in criteria.should
    if (entry := _known_failure(result, criteria, "open")) is not None:
        return msgspec.structs.replace(
            applied,
            outcome=Outcome.WARNING if warns else Outcome.KNOWN,
            case_outcome=result.outcome,
            reason=f"{entry.reason} ({entry.issue}, until {entry.expires})",
        )
    if warns:
        return msgspec.structs.replace(applied, outcome=Outcome.WARNING, case_outcome=result.outcome)
    if not applied.reason and (entry := _known_failure(result, criteria, "expired")) is not None:
        reason = (
            f"it was a known failure until {entry.expires}, which has expired ({entry.place}, {entry.issue})"
        )
        return msgspec.structs.replace(applied, reason=reason)
    return applied


def apply_again(result: CaseResult, criteria: Criteria) -> CaseResult:
    """Return a result of a report, to which a declaration has been applied, after this one is applied in its
    place: the result itself if that changes no outcome. `kvconform verify` and `merge` look at earlier runs.
    """
    ended = msgspec.structs.replace(
        result,
        outcome=result.case_outcome or result.outcome,
        case_outcome=None,
        declaration_rule="",
        reason="" if result.case_outcome is Outcome.FAIL else result.reason,  # a failure has a finding
    )
    applied = apply_declaration(ended, criteria)
    kept = (applied.outcome, applied.case_outcome, applied.declaration_rule) == (
        result.outcome,
        result.case_outcome,
        result.declaration_rule,
    )
    return result if kept else applied


def _known_failure(result: CaseResult, criteria: Criteria, state: str) -> KnownFailure | None:
    """Return the first known failure in this state that matches the case."""
    return next((e for e in criteria.known if e.state == state and e.matches(result.id)), None)


def _apply_unsupported(result: CaseResult, criteria: Criteria) -> CaseResult:
    """Return the result after the unsupported features that the case needs are applied to it."""
    lacking = [name for name in result.features if criteria.features.get(name)]
    if not lacking:
        return result
    declared = f"{lacking[0]} is declared unsupported ({criteria.features[lacking[0]]})"
    outcome, rule, observed = Outcome.NOT_APPLICABLE, "", ""
    judged = result.outcome in (Outcome.PASS, Outcome.FAIL)
    if judged and not all(features.load()[name].refusable for name in lacking):
        observed = ", and a connector cannot refuse it"
    elif result.outcome is Outcome.PASS:
        if not (able := [name for name in lacking if not _needs_no_split(name, result)]):
            observed = ", and every rank has the same KV here, so that it works shows nothing"
        elif shows_feature_works(result, able):
            outcome, rule, observed = Outcome.WARNING, WORKS_THOUGH_UNSUPPORTED, ", but it works"
    elif result.outcome is Outcome.FAIL and not result.refused:
        if broken_rule(result) in criteria.should:  # a refusal could not have kept this rule
            return result
        outcome, rule, observed = (
            Outcome.FAIL,
            WRONG_THOUGH_UNSUPPORTED,
            ", but the connector did not refuse it",
        )
    elif result.outcome is Outcome.FAIL or (result.outcome is Outcome.BLOCKED and result.refused):
        refusal = (result.finding.diagnosis or result.finding.happened) if result.finding else ""
        observed = f", and the connector refused it{f': {refusal}' if refusal else ''}"
    elif result.outcome is Outcome.BLOCKED and _is_due_to(result, lacking):
        observed = f", and the case {result.reason}"
    else:
        # a case that was blocked or not applicable for another reason shows nothing about the declaration
        return result
    return msgspec.structs.replace(
        result,
        outcome=outcome,
        case_outcome=result.outcome,
        declaration_rule=rule,
        reason=declared + observed,
    )


def _is_due_to(result: CaseResult, names: Sequence[str]) -> bool:
    """Whether a BLOCKED case depends on another case which failed and needs one of these features.

    All cases of a cell need the features of the cell. Cases of one variant need the same features.
    """
    case, _, _ = result.depends_on.partition("[")
    if result.depends_on == str(result.cell) or case.endswith(f"::{_START}"):
        return any(features.load()[name].of_cell_alone for name in names)
    return bool(result.depends_on)


def _needs_no_split(name: str, result: CaseResult) -> bool:
    """Whether a result is of a cell in which unequal tensor parallel sizes split nothing."""
    return name == UNEQUAL_SIZES and result.cell is not None and features.same_on_every_rank(result.cell)


def shows_feature_works(result: CaseResult, names: Sequence[str]) -> bool:
    """Whether a PASS shows that one of these features works.

    An engine that starts does not show that bytes arrive. A D that computes the whole prompt itself does
    not show that it can load KV.
    """
    moved = result.evidence is not None and result.evidence.bytes_moved > 0
    loaded = result.evidence is not None and result.evidence.external_tokens > 0
    return moved or any(
        not feature.of_cell_alone and (loaded or not feature.shown_by_load)
        for feature in map(features.load().__getitem__, names)
    )


def broken_rule(result: CaseResult) -> str:
    """Return the id of the rule that a FAIL or a WARNING breaks."""
    return result.declaration_rule or (result.finding.rule if result.finding else result.rule)


def shown_finding(result: CaseResult) -> Finding | None:
    """Return the finding as it is shown.

    If the declaration is broken, the finding has the declaration's rule and reason.
    """
    if not result.declaration_rule:
        return result.finding
    finding = result.finding or Finding(
        rule=result.declaration_rule, happened=f"{result.id.removeprefix('kv::')} passed"
    )
    return msgspec.structs.replace(
        finding, rule=result.declaration_rule, happened=f"{result.reason}: {finding.happened}", check=()
    )


def feature_results(results: Sequence[CaseResult], criteria: Criteria) -> tuple[FeatureResult, ...]:
    """Return one row for each feature of the list, in the order of the list."""
    names = criteria.known_features or features.load()
    return tuple(_feature_result(name, results, criteria) for name in names)


def _feature_result(name: str, results: Sequence[CaseResult], criteria: Criteria) -> FeatureResult:
    declared = criteria.features
    mine = [result for result in results if name in result.features]
    # A case that also needs another unsupported feature may be refused, or may fail, because of that
    # feature. Such a case counts only if this feature is unsupported too and no other case needs it.
    alone = [
        result
        for result in mine
        if not any(declared.get(other) for other in result.features if other != name)
    ]
    why = declared.get(name)
    observed = _observe(name, alone or (mine if why else ()), bool(why))
    if observed == "not looked at" and name in criteria.left_out_features:
        observed = "not selected"
    rule, sentence = "", ""
    if why == "" and observed == "refused":
        rule = REFUSED_THOUGH_SUPPORTED
        sentence = f"{name} is declared supported, but was refused, and no case shows that it works"
    elif why and not features.load()[name].refusable:
        pass
    elif why and observed == "works":
        rule = WORKS_THOUGH_UNSUPPORTED
        sentence = f"hidden ability: {name} is declared unsupported ({why}), but it works"
    elif why and observed == "fails":
        rule = WRONG_THOUGH_UNSUPPORTED
        sentence = f"{name} is declared unsupported ({why}), but the connector fails instead of refusing it"
    return FeatureResult(
        name=name,
        declared="undeclared" if why is None else "unsupported" if why else "supported",
        reason=why or "",
        observed=observed,
        cases=len(mine),
        passed=sum((result.case_outcome or result.outcome) is Outcome.PASS for result in mine),
        rule=rule,
        sentence=sentence,
    )


def _observe(name: str, results: Sequence[CaseResult], unsupported: bool) -> Observed:
    """Return what the results of these cases, before the declaration is applied, show about a feature.

    A connector should refuse an unsupported feature, so any failure that is no warning contradicts the
    declaration. A supported feature fails only in cases about what the feature does.
    """
    outcomes = [(result, result.case_outcome or result.outcome) for result in results]
    if any(
        outcome is Outcome.FAIL
        and result.outcome is not Outcome.WARNING
        and not result.refused
        and (unsupported or features.is_about(name, broken_rule(result), result.features))
        for result, outcome in outcomes
    ):
        return "fails"
    if any(
        outcome is Outcome.PASS
        and shows_feature_works(result, [name])
        and not (unsupported and _needs_no_split(name, result))
        for result, outcome in outcomes
    ):
        return "works"
    if any(result.refused for result in results):
        return "refused"
    return "blocked" if any(outcome is Outcome.BLOCKED for _, outcome in outcomes) else "not looked at"
