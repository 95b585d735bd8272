"""What a declaration makes of what a case said, and what all cases together say about each declared feature.

| declared | the connector | outcome |
|---|---|---|
| unsupported | declines cleanly | NOT-APPLICABLE |
| unsupported | works | NOT-APPLICABLE and a warning; FAIL (KV-DECLARE-002) in a claim |
| unsupported | delivers wrong bytes, dies, hangs | FAIL (KV-DECLARE-003) |
| supported | declines | FAIL under the case's own rule, and KV-DECLARE-001 for the feature |
| known failure | fails | KNOWN |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from pytest_kvconform import features
from pytest_kvconform.declaration import KnownFailure
from pytest_kvconform.result import CaseResult, Finding, Outcome

REFUSED_THOUGH_SUPPORTED, WORKS_THOUGH_UNSUPPORTED, WRONG_THOUGH_UNSUPPORTED = (
    "KV-DECLARE-001",
    "KV-DECLARE-002",
    "KV-DECLARE-003",
)
Observed = Literal["works", "fails", "refused", "blocked", "not looked at"]


class Criteria(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is judged by besides its results."""

    features: dict[str, str]  # declared: name -> why it is not supported, "" if it is
    known: tuple[KnownFailure, ...] = ()
    claim: bool = False  # nothing may be left out, hidden or known
    left_out: int = 0  # cases of the manifest that were not to run


class FeatureResult(msgspec.Struct, frozen=True, kw_only=True):
    """One feature of the list: declared and observed."""

    name: str
    declared: Literal["supported", "unsupported", "undeclared"]
    reason: str = ""  # why it is not supported
    observed: Observed
    cases: int  # that need it
    passed: int  # of these, as they said themselves
    rule: str = ""  # that the declaration breaks
    sentence: str = ""  # how


def apply_declaration(result: CaseResult, criteria: Criteria) -> CaseResult:
    """What becomes of a case's own word under a declaration. Settling twice changes nothing."""
    if result.case_outcome is not None:
        result = msgspec.structs.replace(
            result, outcome=result.case_outcome, case_outcome=None, declaration_rule=""
        )
    settled = _apply_unsupported(result, criteria)
    entry = next(
        (entry for entry in criteria.known if entry.state == "open" and entry.matches(result.id)), None
    )
    if settled.outcome is Outcome.FAIL and entry is not None:
        reason = f"{entry.reason} ({entry.issue}, until {entry.expires})"
        return msgspec.structs.replace(
            settled, outcome=Outcome.KNOWN, case_outcome=result.outcome, reason=reason
        )
    over = next(
        (entry for entry in criteria.known if entry.state == "expired" and entry.matches(result.id)), None
    )
    if settled.outcome is Outcome.FAIL and not settled.reason and over is not None:
        return msgspec.structs.replace(
            settled, reason=f"it was known until {over.expires}, which is over ({over.place}, {over.issue})"
        )
    return settled


def _apply_unsupported(result: CaseResult, criteria: Criteria) -> CaseResult:
    lacking = [name for name in result.features if criteria.features.get(name)]
    if not lacking:
        return result
    name = lacking[0]
    words = f"{name} is declared unsupported ({criteria.features[name]})"
    outcome, against, what = Outcome.NOT_APPLICABLE, "", ""
    if result.outcome is Outcome.PASS:
        if shows_feature_works(result, lacking):
            outcome, against = (Outcome.FAIL, WORKS_THOUGH_UNSUPPORTED) if criteria.claim else (outcome, "")
            what = ", and it works"
    elif result.outcome is Outcome.FAIL and not result.refused:
        outcome, against, what = Outcome.FAIL, WRONG_THOUGH_UNSUPPORTED, ", and it was not refused"
    elif result.outcome is Outcome.FAIL or (result.outcome is Outcome.BLOCKED and result.refused):
        said = (result.finding.diagnosis or result.finding.happened) if result.finding else ""
        what = f", and was refused{f': {said}' if said else ''}"
    else:
        return result  # what could not run, or is not applicable for a reason of its own, shows nothing about the declaration
    return msgspec.structs.replace(
        result, outcome=outcome, case_outcome=result.outcome, declaration_rule=against, reason=words + what
    )


def shows_feature_works(result: CaseResult, names: Sequence[str]) -> bool:
    """Whether a PASS shows that a feature works. An engine that starts shows nothing of where bytes were to move, and a D that computes a
    prompt by itself nothing of what it can be given.
    """
    moved = result.evidence is not None and result.evidence.bytes_moved > 0
    given = result.evidence is not None and result.evidence.external_tokens > 0
    return moved or any(
        not feature.of_cell_alone and (given or not feature.shown_by_load)
        for feature in map(features.load().__getitem__, names)
    )


def broken_rule(result: CaseResult) -> str:
    """The rule that a FAIL breaks."""
    return result.declaration_rule or (result.finding.rule if result.finding else result.rule)


def shown_finding(result: CaseResult) -> Finding | None:
    """The finding as a person reads it: where a declaration makes it one, with the declaration's rule and words before it."""
    if not result.declaration_rule:
        return result.finding
    finding = result.finding or Finding(
        rule=result.declaration_rule, happened=f"{result.id.removeprefix('kv::')} passed"
    )
    return msgspec.structs.replace(
        finding, rule=result.declaration_rule, happened=f"{result.reason}: {finding.happened}", check=()
    )


def feature_results(results: Sequence[CaseResult], criteria: Criteria) -> tuple[FeatureResult, ...]:
    """One row for each feature of the list, in its order."""
    return tuple(_feature_result(name, results, criteria.features) for name in features.load())


def _feature_result(name: str, results: Sequence[CaseResult], declared: Mapping[str, str]) -> FeatureResult:
    mine = [result for result in results if name in result.features]
    # What another missing feature refuses or spoils says nothing about this one; of two that are missing together each is seen to be.
    alone = [
        result
        for result in mine
        if not any(declared.get(other) for other in result.features if other != name)
    ]
    observed = _observe(name, alone or (mine if declared.get(name) else ()))
    said = [result.case_outcome or result.outcome for result in mine]
    why = declared.get(name)
    rule, sentence = "", ""
    if why == "" and observed == "refused":
        rule, sentence = (
            REFUSED_THOUGH_SUPPORTED,
            f"{name} is declared as supported; it was refused, and no case showed that it works",
        )
    elif why and observed == "works":
        rule, sentence = (
            WORKS_THOUGH_UNSUPPORTED,
            f"hidden ability: {name} is declared unsupported ({why}), and it works",
        )
    elif why and observed == "fails":
        rule, sentence = (
            WRONG_THOUGH_UNSUPPORTED,
            f"{name} is declared unsupported ({why}), and is not refused but goes wrong",
        )
    return FeatureResult(
        name=name,
        declared="undeclared" if why is None else "unsupported" if why else "supported",
        reason=why or "",
        observed=observed,
        cases=len(mine),
        passed=said.count(Outcome.PASS),
        rule=rule,
        sentence=sentence,
    )


def _observe(name: str, results: Sequence[CaseResult]) -> Observed:
    def said(result: CaseResult) -> Outcome:
        return result.case_outcome or result.outcome

    if any(said(result) is Outcome.FAIL and not result.refused for result in results):
        return "fails"
    if any(said(result) is Outcome.PASS and shows_feature_works(result, [name]) for result in results):
        return "works"
    if any(result.refused for result in results):
        return "refused"
    return "blocked" if any(said(result) is Outcome.BLOCKED for result in results) else "not looked at"
