"""Whether the parts of a report follow from each other: its verdict, declaration and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec

from pytest_kvconform import declaration
from pytest_kvconform.apply_declaration import apply_again
from pytest_kvconform.declaration import AMOUNTS, KnownFailure, known_failure_state, read_features, read_known
from pytest_kvconform.declarations import BundledDeclaration, bundled_declarations
from pytest_kvconform.declarations.children import together
from pytest_kvconform.report.document import (
    Report,
    criteria_of,
    is_of_this_suite,
    recompute_verdict,
    shard_of,
)
from pytest_kvconform.result import Outcome
from pytest_kvconform.verdict import Cause, Verdict

_DIFFERS = "subject.{} differs from the settings of the report"
# cases that find whether the engines of a cell, or one hand-over, were refused or failed
_FINDS = re.compile(r"kv::[^\s\[]+::(?:engines_start|completes)\[[^\]]+\]")


def inconsistencies(report: Report) -> list[str]:
    """Return a sentence for each part of a report that does not follow from the rest.

    `kvconform verify` prints these sentences.
    """
    found, criteria = [*_check_declaration(report), *_check_refusals(report)], criteria_of(report)
    if report.day is not None and report.day > declaration.today():
        found.append(f"day: the report is of {report.day}, but today is {declaration.today()}")
    for result in report.results:
        if (applied := apply_again(result, criteria)) is not result:
            found.append(
                f"{result.id} is {result.outcome.value} in the report, but the declaration makes it "
                f"{applied.outcome.value}"
            )
    if strange := sorted({result.id for result in report.results} - set(report.selection.selected)):
        found.append(f"{len(strange)} results are of cases that were not selected, the first is {strange[0]}")
    if report.selection.elsewhere and not shard_of(report):
        found.append("selection.elsewhere names cases of other shards, but the run had no --kv-shard")
    if twice := sorted({*report.selection.selected} & {*report.selection.elsewhere}):
        found.append(f"{len(twice)} cases are both selected and elsewhere, the first is {twice[0]}")
    found += _check_verdict(report)
    return found


def _check_verdict(report: Report) -> Iterator[str]:
    """Yield a sentence if the verdict does not follow from the results.

    Another suite may have had other sentences for the same, and others for which cases have one cause.
    """
    words = (verdict := recompute_verdict(report)), (given := report.verdict)
    if not is_of_this_suite(report):
        verdict, given = map(_without_words, words)
    if (verdict.word, verdict.sentence) != (given.word, given.sentence):
        here, there = (f"{one.word} ({one.sentence})" for one in words)
        yield f"the verdict of the report is {there}, but its results give {here}"
    elif differ := [key for key in verdict.__struct_fields__ if getattr(verdict, key) != getattr(given, key)]:
        yield f"verdict.{', verdict.'.join(differ)} of the report does not follow from its results"


def _without_words(verdict: Verdict) -> Verdict:
    """Return a verdict without its sentences. Its causes are one for each outcome."""
    ids: dict[Outcome, set[str]] = {}
    for one in verdict.causes:
        ids.setdefault(one.outcome, set()).update(one.ids)
    causes = (
        Cause(outcome=outcome, sentence="", rules=(), ids=tuple(sorted(names)))
        for outcome, names in sorted(ids.items())
    )
    return msgspec.structs.replace(
        verdict,
        sentence="",
        causes=tuple(causes),
        levels=tuple(msgspec.structs.replace(one, sentence="") for one in verdict.levels),
        features=tuple(msgspec.structs.replace(row, sentence="") for row in verdict.features),
    )


def _check_declaration(report: Report) -> Iterator[str]:
    """Yield sentences about the declaration: the state of known failures, and pyproject.toml's tables.

    The settings of the report hold these tables too. They do not hold a file of --kv-declare.
    """
    subject, today = report.subject, declaration.today()
    for number, entry in enumerate(subject.known):
        state = known_failure_state(entry, report.environment.get("vllm"))
        if entry.day is None or entry.day > today:
            yield f"subject.known[{number}] was applied on {entry.day or 'no day'}, but today is {today}"
        elif entry.state != state:
            yield (
                f"subject.known[{number}] is {entry.state} in the report, but its last day and its "
                "versions of "
                f"vLLM make it {state}"
            )
    profile = (setting := report.settings.get("profile")) and setting.value  # it wins over every declaration
    if profile and profile != subject.profile:
        yield _DIFFERS.format("profile")
    # Another version of the suite may declare vLLM's connectors in another way.
    if report.settings["declare"].value or not is_of_this_suite(report):
        return
    features, known = (
        json.loads(report.settings[key].value or empty)
        for key, empty in (("features", "{}"), ("known", "[]"))
    )
    ours = None if subject.module else bundled_declarations().get(subject.connector)
    bundled = together(ours or BundledDeclaration(features={}), subject.config, profile or "")
    if not profile and bundled.profile != subject.profile:
        yield _DIFFERS.format("profile")
    declared = read_features(bundled.features, "features")
    declared |= read_features(features, "features")
    if declared != subject.features:
        differ = sorted(
            name for name in declared | subject.features if declared.get(name) != subject.features.get(name)
        )
        yield f"subject.features: {', '.join(differ)} differs from the settings of the report"
    for key in (*AMOUNTS, "remembers", "save_delay"):
        setting = report.settings.get(key)  # an earlier report has not all of them
        if getattr(subject, key) != ((setting and setting.value) or getattr(bundled, key)):
            yield _DIFFERS.format(key)
    written = [_as_written(entry) for entry in read_known(known, "known")]
    if written != [_as_written(entry) for entry in subject.known]:
        yield "subject.known: the entries differ from the settings of the report"


def _as_written(entry: KnownFailure) -> KnownFailure:
    """Return an entry without the fields that a run adds."""
    return msgspec.structs.replace(entry, day=None, state="open", place="")


def _check_refusals(report: Report) -> Iterator[str]:
    """Yield a sentence for each result whose `refused` does not follow from the report.

    The finding of a refusal tells how the connector declined. A case that was blocked by a refusal depends
    on the case that has this finding.
    """
    results = {result.id: result for result in report.results}
    for result in report.results:
        outcome = result.case_outcome or result.outcome
        blocked = outcome is Outcome.BLOCKED and _FINDS.fullmatch(result.depends_on)
        on = result.depends_on if blocked else ""
        because = result.reason.partition(on)[2].removeprefix(": ") if on else ""
        first = results.get(on)
        if outcome is Outcome.FAIL:
            refused = bool(result.finding and result.finding.declined)
        elif (
            first is not None
            and (first.case_outcome or first.outcome) is Outcome.FAIL
            # a later start may have failed in another way
            and because in ("", first.finding.happened if first.finding else "")
        ):
            refused = first.refused
        else:
            refused = result.refused and outcome in (Outcome.BLOCKED, Outcome.NOT_APPLICABLE)
        if refused != result.refused:
            word = {True: "a refusal", False: "no refusal"}
            yield (
                f"{result.id} is {word[result.refused]} in the report, but {on or 'its finding'} makes it "
                f"{word[refused]}"
            )
