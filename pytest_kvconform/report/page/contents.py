"""What the page shows, as plain records for its template and its script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pytest_kvconform.report.document import Report
from pytest_kvconform.report.failure import compress_ids, failure_line, failure_sections
from pytest_kvconform.report.page.timeline import Timeline, timeline
from pytest_kvconform.result import QUESTIONS, CaseResult, Evidence, Outcome
from pytest_kvconform.rules import Rule
from pytest_kvconform.settings import Settings
from pytest_kvconform.verdict import Cause, LevelVerdict

_WORST = (  # the outcome that colours a cell of the table
    Outcome.HARNESS,
    Outcome.FAIL,
    Outcome.WARNING,
    Outcome.BLOCKED,
    Outcome.KNOWN,
    Outcome.PASS,
    Outcome.NOT_APPLICABLE,
)
_MOST_LINES = 40  # of ids of one cause; the list below the causes has them all


class Square(NamedTuple):
    """The results of one level in one cell: a square of the table."""

    counts: list[tuple[str, int]]  # outcome and how many, the worst first
    worst: str


class Row(NamedTuple):
    """One topology of a family."""

    topology: str  # with the setup: "P1D2.b16"
    squares: list[Square | None]  # one for each level that ran; None: no case


class ShownCause(NamedTuple):
    """Cases that did not pass for one reason, with the sections of the first one."""

    cause: Cause
    sections: list[tuple[str, list[str]]]
    timeline: Timeline | None
    ids: list[str]  # ids that differ in the variant are one line
    more: int  # lines that are not shown


class Score(NamedTuple):
    """One comparison of answers with those of D alone."""

    cell: str
    case: str
    outcome: str
    answers: int | None  # None: the case did not pass
    notes: list[tuple[str, str]]
    questions: str  # a sign for each question; "" if the report has none
    line: str  # what went wrong


def set_by_user(report: Report) -> list[tuple[str, str, str]]:
    """Return (key, value, origin) of each setting that is not the default."""
    return [
        (key, ", ".join(map(str, one.value)) if isinstance(one.value, list) else str(one.value), one.origin)
        for key, one in sorted(report.settings.items())
        if one.origin != "default"
    ]


def levels_that_ran(report: Report) -> list[LevelVerdict]:
    """Return the columns of the table of cells."""
    return [one for one in report.verdict.levels if one.word != "NOT-RUN"]


def families(report: Report) -> dict[str, list[Row]]:
    """Return the rows of the table of cells, by family, in the order of the names."""
    found: dict[tuple[str, str], dict[str, list[Outcome]]] = {}
    for result in report.results:
        levels = found.setdefault(_place(result), {})
        levels.setdefault(result.level, []).append(result.outcome)
    columns: list[str] = [one.name for one in levels_that_ran(report)] or [""]
    table: dict[str, list[Row]] = {}
    for (family, topology), levels in sorted(found.items()):
        squares = [_square(levels[name]) if name in levels else None for name in columns]
        table.setdefault(family, []).append(Row(topology, squares))
    return table


def _place(result: CaseResult) -> tuple[str, str]:
    if result.cell is None:
        return "-", "-"
    return result.cell.family, str(result.cell).removeprefix(f"{result.cell.family}-")


def _square(outcomes: Iterable[Outcome]) -> Square:
    counts = worst_first(Counter(outcomes))
    return Square(counts, counts[0][0])


def worst_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the outcomes that occur and how often, the worst first."""
    return [(outcome.value, counts[outcome]) for outcome in _WORST if counts.get(outcome)]


def causes(report: Report, rules: Mapping[str, Rule], settings: Settings) -> list[ShownCause]:
    """Return the causes of the verdict in its order."""
    results = {result.id: result for result in report.results}
    shown = []
    for cause in report.verdict.causes:
        lines = compress_ids(cause.ids)
        first = results.get(cause.ids[0]) if cause.ids else None
        sections = _sections(first, rules, settings) if first else []
        calls = timeline(first.finding.calls if first and first.finding else ())
        more = max(0, len(lines) - _MOST_LINES)
        shown.append(ShownCause(cause, sections, calls, lines[:_MOST_LINES], more))
    return shown


def _sections(
    result: CaseResult, rules: Mapping[str, Rule], settings: Settings
) -> list[tuple[str, list[str]]]:
    """Return what is known of one result, without empty sections."""
    if result.evidence is not None and result.outcome is Outcome.PASS:
        return [("evidence", _evidence_lines(result.evidence))]
    rows = [(name, list(lines)) for name, lines in failure_sections(result, dict(rules), settings)]
    if result.outcome is Outcome.NOT_APPLICABLE:
        rows = [row for row in rows if row[0] != "again"]
    return [(name, lines) for name, lines in rows if any(lines)]


def _calls(result: CaseResult) -> list[tuple[str, list[str]]]:
    """Return where the timeline of a result in the list is: it is drawn once, with the cause."""
    if result.finding is None or not result.finding.calls:
        return []
    return [("calls", ["The timeline of hook calls is with the cause of this case."])]


def _evidence_lines(evidence: Evidence) -> list[str]:
    lines = [f"{evidence.looked_at:,} {evidence.unit} compared"]
    for number, words in (
        (evidence.bytes_moved, "bytes moved"),
        (evidence.external_tokens, "tokens loaded"),
        (evidence.computed_tokens, "prompt tokens computed by D"),
    ):
        lines += [f"{number:,} {words}"] if number else []
    return lines + [f"{name}: {value}" for name, value in evidence.notes.items()]


def results(report: Report, rules: Mapping[str, Rule], settings: Settings) -> dict[str, Any]:
    """Return the data of the script: every result, as short rows, and the words that repeat in them.

    A row is (id, outcome, level, family, topology, rule, seconds, line, cause, sections). `cause` is the
    place of the result's cause in the verdict, -1 if it has none.
    """
    place = {name: number for number, one in enumerate(report.verdict.causes) for name in one.ids}
    rows = [
        (
            result.id,
            result.outcome.value,
            result.level,
            *_place(result),
            result.rule,
            result.seconds,
            failure_line(result),
            place.get(result.id, -1),
            _sections(result, rules, settings) + _calls(result),
        )
        for result in report.results
    ]
    return {
        "rows": rows,
        "causes": [one.sentence for one in report.verdict.causes],
    }


def accuracy(report: Report) -> list[Score]:
    """Return the comparisons of answers. Those that did not apply are left out."""
    scores = []
    for result in report.results:
        if not result.rule.startswith("KV-ACC-") or result.outcome is Outcome.NOT_APPLICABLE:
            continue
        evidence = result.evidence
        notes = dict(evidence.notes) if evidence else {}
        questions = str(notes.pop(QUESTIONS, ""))
        case, _, variant = result.id.removeprefix("kv::").partition("::")[2].rstrip("]").partition("[")
        words = [case, *variant.split("-", 2)[2:]]
        scores.append(
            Score(
                cell=str(result.cell or "-"),
                case=" ".join(words).replace("_", " "),
                outcome=result.outcome.value,
                answers=evidence.looked_at if evidence else None,
                notes=[(name, str(value)) for name, value in notes.items()],
                questions=questions,
                line=failure_line(result),
            )
        )
    return sorted(scores)
