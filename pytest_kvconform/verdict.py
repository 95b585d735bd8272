"""The verdict of a run, decided from its results.

Only this module decides: the terminal, `report.json`, `kvconform verify` and the exit code all use its
verdict. HARNESS outranks VIOLATES, VIOLATES outranks INCOMPLETE, INCOMPLETE outranks CONFORMS. So cases
that could not run are never hidden behind cases that passed. Warnings (broken rules of strength SHOULD) are
counted in the headline and change neither the word nor the exit code.

Each level has a verdict of its own, decided in the same way from its cases alone. It changes neither the word
of the run nor the exit code: one violation of any level makes the run VIOLATES.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from pytest_kvconform.apply_declaration import (
    WORKS_THOUGH_UNSUPPORTED,
    Criteria,
    FeatureResult,
    broken_rule,
    feature_results,
    shown_finding,
)
from pytest_kvconform.declaration import undeclared
from pytest_kvconform.features import load as load_features
from pytest_kvconform.result import LEVELS, CaseResult, Level, Outcome

Word = Literal["CONFORMS", "CONFORMS-EXCEPT", "VIOLATES", "INCOMPLETE", "HARNESS"]
EXIT_CODES: dict[Word, int] = {  # 2 to 6 are pytest's own
    "CONFORMS": 0,
    "CONFORMS-EXCEPT": 0,  # except known failures, which have an issue and a date; a claim allows none
    "VIOLATES": 1,
    "INCOMPLETE": 10,
    "HARNESS": 11,
}
# Tiers whose cases hand KV over. A run of them must have moved bytes.
MOVING_TIERS = ("bytes", "engine", "accuracy")
COUNTING_TIER = "accuracy"  # of them, the one in which loaded tokens are evidence enough


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Cases that did not pass for one reason."""

    outcome: Outcome
    sentence: str  # the diagnosis, or what happened, or the reason
    rules: tuple[str, ...]
    ids: tuple[str, ...]


class LevelVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of one level."""

    name: Level
    word: Word | Literal["NOT-APPLICABLE", "NOT-RUN"]
    sentence: str  # the reason
    counts: dict[str, int]  # outcome -> cases of the level; only what occurs


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of a run about the connector."""

    word: Word
    exit_code: int
    sentence: str  # the reason, and what to change
    counts: dict[str, int]  # outcome -> cases; only what occurs
    causes: tuple[Cause, ...]  # violations, warnings, harness, blocked, known; the most frequent first
    features: tuple[FeatureResult, ...] = ()  # declared and observed; empty without criteria
    levels: tuple[LevelVerdict, ...] = ()  # every level; empty if no result has one

    @property
    def headline(self) -> str:
        """Return the verdict as one line."""
        count = self.counts.get(Outcome.WARNING.value, 0)
        warnings = "" if not count else ", with 1 warning" if count == 1 else f", with {count} warnings"
        if self.word == "CONFORMS-EXCEPT":
            return f"CONFORMS{warnings}{',' if warnings else ''} {self.sentence}"
        return f"{self.word}{warnings}: {self.sentence}"


def decide_verdict(
    results: Sequence[CaseResult],
    expected: Sequence[str] | None = None,
    troubles: Sequence[str] = (),
    criteria: Criteria | None = None,
) -> Verdict:
    """Return the verdict of a run. The order of the results does not matter. The declaration has been applied
    to each of them.

    `expected`: ids that were selected; None if unknown. `troubles`: sentences about processes or files of
    the suite (a process did not end, the report could not be written); each makes the verdict HARNESS.
    `criteria`: what was declared; None if no declaration is required.
    """
    results = sorted((_require_evidence(result) for result in results), key=lambda result: result.id)
    expected = sorted(expected) if expected is not None else None
    word, sentence = _word_and_sentence(results, expected, troubles, criteria)
    return Verdict(
        word=word,
        exit_code=EXIT_CODES[word],
        sentence=sentence,
        counts=_counts(results),
        causes=_causes(results),
        features=feature_results(results, criteria) if criteria is not None else (),
        levels=_levels(results, expected, troubles, criteria),
    )


def _counts(results: Sequence[CaseResult]) -> dict[str, int]:
    found = Counter(result.outcome for result in results)
    return {outcome.value: found[outcome] for outcome in Outcome if found[outcome]}


def _levels(
    results: Sequence[CaseResult],
    expected: Sequence[str] | None,
    troubles: Sequence[str],
    criteria: Criteria | None,
) -> tuple[LevelVerdict, ...]:
    """Return the verdict of each level.

    What concerns the whole run counts for every level that ran: selected cases without a result, whose level
    nobody knows, troubles of the suite, and cases that a claim leaves out.
    """
    if not any(result.level for result in results):
        return ()
    done, found = {result.id for result in results}, []
    missing = [name for name in expected or () if name not in done]
    for level in LEVELS:
        mine = [result for result in results if result.level == level]
        word: Word | Literal["NOT-APPLICABLE", "NOT-RUN"]
        if not mine:
            word, sentence = "NOT-RUN", "no case of this level ran"
        elif all(result.outcome is Outcome.NOT_APPLICABLE for result in mine) and not (
            criteria and _declaration_mistake(mine, criteria, 0, level)
        ):
            word, sentence = "NOT-APPLICABLE", f"{_count_cases(len(mine))} did not apply: {mine[0].reason}"
        else:
            names = [*(result.id for result in mine), *missing]
            word, sentence = _word_and_sentence(mine, names, troubles, criteria, level)
        found.append(LevelVerdict(name=level, word=word, sentence=sentence, counts=_counts(mine)))
    return tuple(found)


def signature(result: CaseResult) -> str:
    """Return a text that is equal for results with one cause."""
    finding = result.finding
    if finding is None or result.outcome is Outcome.NOT_APPLICABLE:
        return result.reason or f"{result.id} has no reason"
    return finding.signature or finding.diagnosis or finding.happened


def cause_sentence(result: CaseResult) -> str:
    """Return the shortest sentence that tells what went wrong."""
    finding = shown_finding(result)
    return (finding.diagnosis or finding.happened) if finding else signature(result)


def _require_evidence(result: CaseResult) -> CaseResult:
    """Return a PASS without evidence as HARNESS, and any other result unchanged.

    It does not matter who wrote the PASS into a report.
    """
    if Outcome.PASS in (result.outcome, result.case_outcome) and (
        result.evidence is None or result.evidence.looked_at <= 0
    ):
        return msgspec.structs.replace(
            result, outcome=Outcome.HARNESS, case_outcome=None, reason="the case passed without evidence"
        )
    return result


def _word_and_sentence(
    results: Sequence[CaseResult],
    expected: Sequence[str] | None,
    troubles: Sequence[str],
    criteria: Criteria | None,
    level: Level | None = None,
) -> tuple[Word, str]:
    """Return the verdict of a run, or of one level of it, and the reason."""

    def of(outcome: Outcome) -> list[CaseResult]:
        return [result for result in results if result.outcome is outcome]

    if harness := of(Outcome.HARNESS):
        return "HARNESS", (
            f"{_count_cases(len(harness))} ended in an error of the suite or of this machine, not of the "
            "connector; "
            f"the first: {harness[0].reason or harness[0].id}"
        )
    if troubles:
        return "HARNESS", f"the suite did not end cleanly: {troubles[0]}"
    if failed := of(Outcome.FAIL):
        broken = sorted({broken_rule(result) for result in failed})
        return (
            "VIOLATES",
            f"{_count_cases(len(failed))} {'break' if len(failed) > 1 else 'breaks'} {_rules_text(broken)}",
        )
    if lacks := _lacks(results, expected, criteria, level):
        return "INCOMPLETE", lacks
    passed, known, here = of(Outcome.PASS), of(Outcome.KNOWN), _where(criteria)
    moved = _bytes_moved(passed)
    tail = (f", {moved:,} bytes moved and compared" if moved else "") + (here and f",{here}")
    if known:
        failures = "1 known failure" if len(known) == 1 else f"{len(known)} known failures"
        return (
            "CONFORMS-EXCEPT",
            f"except {failures}: {_count_cases(len(passed))} passed{tail}; the first: {known[0].reason}",
        )
    return "CONFORMS", f"{_count_cases(len(passed))} passed{tail}"


def _lacks(
    results: Sequence[CaseResult],
    expected: Sequence[str] | None,
    criteria: Criteria | None,
    level: Level | None,
) -> str:
    """Return what a run, or a level of it, lacks to be complete, as one sentence; "" if nothing.

    Its results have no FAIL and no HARNESS.
    """
    if not results and not expected:
        return (
            "no case ran, because none was selected: "
            "widen --kv-tier, --kv-family, --kv-topology, --kv-rule, -k or -m"
        )
    done = {result.id for result in results}
    if missing := [name for name in expected or () if name not in done]:
        return (
            f"{len(missing)} of {_count_cases(len(expected or ()))} that were selected have no result, "
            f"the first is {missing[0]}: "
            "the run was stopped or a worker died; run it again to the end"
        )
    if blocked := [result for result in results if result.outcome is Outcome.BLOCKED]:
        return _blocked_sentence(blocked, len(results))
    known = sum(result.outcome is Outcome.KNOWN for result in results)
    if criteria is not None and (wrong := _declaration_mistake(results, criteria, known, level)):
        return wrong
    passed = [result for result in results if result.outcome is Outcome.PASS]
    if not passed:
        return (
            f"no case passed{_where(criteria)}: every case is not applicable, a warning or a known failure, "
            "which shows nothing"
        )
    moving = any(
        _tier(result) in MOVING_TIERS and not (level and result.outcome is Outcome.NOT_APPLICABLE)
        for result in results
    )
    # a server counts tokens, and bytes only if the connector has a metric of them
    loaded = any(
        result.evidence and result.evidence.external_tokens and _tier(result) == COUNTING_TIER
        for result in passed
    )
    if moving and not loaded and not _bytes_moved(passed):
        return (
            f"{_count_cases(len(passed))} passed{_where(criteria)}, but no byte was moved: also select cases "
            "that compare KV (kv::engine/bytes), "
            "or check whether the connector transfers anything with this --kv-config"
        )
    return ""


def _bytes_moved(results: Sequence[CaseResult]) -> int:
    return sum(result.evidence.bytes_moved for result in results if result.evidence)


def _where(criteria: Criteria | None) -> str:
    """ " in shard 1/2 alone", or ""."""
    return f" in shard {criteria.shard} alone" if criteria and criteria.shard else ""


def _blocked_sentence(blocked: Sequence[CaseResult], count: int) -> str:
    """Return how many of `count` cases could not run, and the most frequent reason."""
    reasons = sorted(
        {result.reason for result in blocked},
        key=lambda reason: -sum(result.reason == reason for result in blocked),
    )
    more = f" (and {len(reasons) - 1} other reasons)" if len(reasons) > 1 else ""
    depends = any(result.depends_on for result in blocked if result.reason == reasons[0])
    here = "" if depends else " here"  # the cause is not this machine, if another case failed
    return f"{len(blocked)} of {_count_cases(count)} could not run{here}: {reasons[0]}{more}"


def _declaration_mistake(
    results: Sequence[CaseResult], criteria: Criteria, known: int, level: Level | None
) -> str:
    """Return what must change in the declaration before the verdict can be CONFORMS; "" if nothing.

    The answer is one sentence.

    `known`: how many results are KNOWN. `level`: of these results alone; None: of the run.
    """
    for entry in criteria.known:
        mine = [result for result in results if entry.matches(result.id)]
        name = f"{entry.place} ({entry.case})"
        if entry.state == "expired" and (mine or not (criteria.left_out or criteria.shard or level)):
            return (
                f"{name} expired on {entry.expires}: fix the failure, or read {entry.issue} and set "
                "another date"
            )
        passed = [result.id for result in mine if result.outcome is Outcome.PASS]
        if passed and entry.state == "open":
            every = len(passed) == len(mine) and not criteria.shard
            change = "remove the entry" if every else "let it match only cases that fail"
            return (
                f"{len(passed)} of {_count_cases(len(mine))} of {name} no longer fail, the first is "
                f"{passed[0]}: "
                f"{change}"
            )
    needed = {name for result in results for name in result.features}
    names = undeclared(criteria.features, criteria.known_features)
    if missing := [name for name in names if name in needed or not level]:
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        count = f"{len(missing)} features are" if len(missing) > 1 else "1 feature is"
        return f"{count} not declared ({shown}): add the lines printed above to [tool.kvconform.features]"
    tested = load_features()
    for name, why in criteria.features.items():
        if level and name in tested and tested[name].level != level:
            continue  # cases of the feature's own level test it
        mine = [result for result in results if name in result.features]
        outcomes = {result.case_outcome or result.outcome for result in mine}
        if why == "" and outcomes == {Outcome.NOT_APPLICABLE} and name not in criteria.left_out_features:
            return f"{name} is declared supported, but no case could test it: {mine[0].reason}"
    if criteria.claim:
        for result in results:
            if result.declaration_rule == WORKS_THOUGH_UNSUPPORTED:
                return f"a claim declares every feature that works as true: {result.reason} ({result.id})"
    if criteria.claim and criteria.left_out:
        return (
            f"a claim leaves out no case, but {_count_cases(criteria.left_out)} of the manifest did not run"
        )
    if criteria.claim and known:
        return f"a claim allows no known failures, but there are {known}"
    return ""


def _causes(results: Sequence[CaseResult]) -> tuple[Cause, ...]:
    order = (Outcome.FAIL, Outcome.WARNING, Outcome.HARNESS, Outcome.BLOCKED, Outcome.KNOWN)
    groups: dict[tuple[Outcome, str], list[CaseResult]] = {}
    for result in results:
        if result.outcome in order:
            groups.setdefault((result.outcome, signature(result)), []).append(result)
    causes = [
        Cause(
            outcome=outcome,
            sentence=cause_sentence(group[0]),
            rules=tuple(sorted({broken_rule(result) for result in group})),
            ids=tuple(result.id for result in group),
        )
        for (outcome, _), group in groups.items()
    ]
    return tuple(
        sorted(causes, key=lambda cause: (order.index(cause.outcome), -len(cause.ids), cause.ids[0]))
    )


def _tier(result: CaseResult) -> str:
    """The tier of a result's case."""
    return result.id.removeprefix("kv::").partition("/")[0]


def _count_cases(count: int) -> str:
    return f"{count} case" if count == 1 else f"{count} cases"


def _rules_text(rules: Sequence[str]) -> str:
    if len(rules) == 1:
        return f"the rule {rules[0]}"
    shown = ", ".join(rules[:4]) + (", ..." if len(rules) > 4 else "")
    return f"{len(rules)} rules: {shown}"
