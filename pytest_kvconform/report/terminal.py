"""Last lines of a run: few, first the levels, always with the verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pytest_kvconform.apply_declaration import FeatureResult
from pytest_kvconform.extras import EXTRA
from pytest_kvconform.plan import tier_order
from pytest_kvconform.report.document import Report, shard_of
from pytest_kvconform.report.failure import rerun_command, settings_of
from pytest_kvconform.result import Outcome
from pytest_kvconform.verdict import Cause, LevelVerdict

Line = tuple[str, dict[str, bool]]  # text, and how the terminal shows it

_MOST_LINES = 32  # under the headline; violations get the lines that the other parts leave free
_MOST_ROWS, _MOST_PAIRS, _MOST_WRONG, _MOST_VIOLATIONS = 7, 3, 2, 4
_GROUPS = (
    (Outcome.FAIL, "violation"),
    (Outcome.WARNING, "warning"),
    (Outcome.HARNESS, "harness error"),
    (Outcome.BLOCKED, "blocked case"),
)
_SIGNS = {
    Outcome.PASS: "✓",
    Outcome.FAIL: "✗",
    Outcome.WARNING: "w",
    Outcome.BLOCKED: "B",
    Outcome.HARNESS: "!",
    Outcome.NOT_APPLICABLE: "n",
    Outcome.KNOWN: "k",
}
_ASCII = {"✓": " ok", "✗": " bad", "·": ".", "—": "-"}
_COLOURS = {
    "CONFORMS": "green",
    "CONFORMS-EXCEPT": "yellow",
    "VIOLATES": "red",
    "HARNESS": "red",
    "INCOMPLETE": "yellow",
    "NOT-APPLICABLE": "",
}


def title(report: Report) -> str:
    """Return the headline: the connector, vLLM, the suite and the device."""
    facts = report.facts or {}
    subject = " ".join(
        str(word) for word in (facts.get("name") or report.subject.connector, facts.get("version")) if word
    )
    if settings_of(report).deployed:  # what is installed here, and on what it runs, is another matter
        vllm, device = facts.get("vllm") or "of an unknown version", "deployed servers"
    else:
        vllm = facts.get("vllm") or report.environment.get("vllm") or "not installed"
        device = facts.get("device") or report.settings["device"].value
    return f"KV conformance · {subject} · vLLM {vllm} · suite {report.suite} · {device}"


def summary(report: Report, report_path: str, width: int, unicode: bool) -> list[Line]:
    """Return all lines under the headline. `width` in columns; without `unicode` every character is ASCII."""
    verdict = report.verdict
    above = [*_levels(verdict.levels, width, verdict.sentence), *((row, {}) for row in _table(report, width))]
    above += [(line, {}) for line in what_ran(report)]
    above += [(line, {}) for line in left_out_here(report)]
    if stood_in := (report.facts or {}).get("stand_in"):
        above.append((f"device: {stood_in}", {}))
    if line := _not_applicable(report, width):
        above.append((line, {}))
    selection = report.selection
    whole = not (selection.left_out or selection.elsewhere)
    above += [(row, {}) for row in _features(verdict.features, "matrix" if whole else "selection", width)]
    below: list[Line] = [
        line for outcome, word in _GROUPS[1:] for line in _causes(verdict.causes, outcome, word, 1)
    ]
    below += [(f"again: {command}", {}) for command in _again(report)]
    below += [(f"trouble: {sentence}", {"red": True}) for sentence in report.troubles[:1]]
    below.append((verdict.headline, {_COLOURS[verdict.word]: True, "bold": True}))
    below.append((f"report: {report_path}", {}))
    room = _MOST_LINES - len(above) - len(below) - 1
    lines = above + _causes(verdict.causes, *_GROUPS[0], max(1, min(room, _MOST_VIOLATIONS))) + below
    return lines if unicode else [(to_ascii(text), markup) for text, markup in lines]


def what_ran(report: Report) -> list[str]:
    """Return a line for a selection, and one for a shard."""
    chosen, lines = report.selection, []
    if chosen.left_out:
        lines.append(f"selection: {len(chosen.manifest) - chosen.left_out} of {len(chosen.manifest)}")
    if shard := shard_of(report):
        every = len(chosen.selected) + len(chosen.elsewhere)
        lines.append(f"shard {shard}: {len(chosen.selected)} of {_count(every, 'case')}; see kvconform merge")
    return lines


def left_out_here(report: Report) -> list[str]:
    """Return a line for each reason for which cases of the matrix are not in the manifest."""
    limits = report.selection.limits
    lines = [f"left out here: {_count(len(one.ids), 'case')} of {one.limit}" for one in limits]
    if cases := report.selection.not_installed:
        tier = cases[0].removeprefix("kv::").partition("/")[0]
        lines.append(f"{tier}: left out, install {EXTRA} ({_count(len(cases), 'case')})")
    return lines


def can_show(stream: Any, text: str) -> bool:
    """Return whether the encoding of a stream has every character of a text."""
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def to_ascii(text: str) -> str:
    """Return the text in ASCII: a sign of the table becomes a word, any other character a question mark."""
    for sign, word in _ASCII.items():
        text = text.replace(sign, word)
    return text.replace("\u00b7", ".").encode("ascii", "replace").decode("ascii")


def _again(report: Report) -> list[str]:
    """Return the command that runs the case on which the most blocked cases depend, if this run did not."""
    done = {result.id for result in report.results}
    depends_on = {result.id: result.depends_on for result in report.results}
    for cause in report.verdict.causes:
        case = depends_on[cause.ids[0]] if cause.outcome is Outcome.BLOCKED else ""
        if case and not _names(case, done) and _names(case, report.selection.manifest):
            return [rerun_command(settings_of(report), case)]
    return []


def _names(case: str, ids: Iterable[str]) -> bool:
    """Whether one of the ids is this case, whose cell and variant may be left out."""
    return any(name == case or name.startswith(f"{case}[") for name in ids)


def _levels(levels: Sequence[LevelVerdict], width: int, sentence: str) -> list[Line]:
    """Return a line for each level that ran, one for its reason, and one for the other levels together.

    The counts of a level are reason enough if it conforms or is violated. `sentence`: of the run, whose last
    line has it.
    """
    ran = [one for one in levels if one.word != "NOT-RUN"]
    others = [one.name for one in levels if one.word == "NOT-RUN"]
    names = max((len(one.name) for one in ran), default=0)
    words = max((len(one.word) for one in ran), default=0)
    lines: list[Line] = []
    for one in ran:
        counts = " ".join(f"{count}{_SIGNS[name]}" for name in _SIGNS if (count := one.counts.get(name)))
        text = f"level {one.name.ljust(names)}  {one.word.ljust(words)}  {counts}"
        lines.append((_cut(text, width), {colour: True} if (colour := _COLOURS[one.word]) else {}))
        if one.word not in ("CONFORMS", "VIOLATES") and one.sentence != sentence:
            lines.append((_cut(f"  {' '.join(one.sentence.split())}", width), {}))
    return lines + ([(f"level {', '.join(others)}: not run", {})] if ran and others else [])


def _causes(causes: Sequence[Cause], outcome: Outcome, word: str, most: int) -> list[Line]:
    """Return lines: how many cases have an outcome, and their most frequent causes."""
    mine = [cause for cause in causes if cause.outcome is outcome]
    if not mine:
        return []
    some = f", the first {most}" if len(mine) > most > 1 else ", the first" if len(mine) > most else ""
    head = f"{_count(sum(len(cause.ids) for cause in mine), word)}, {_count(len(mine), 'cause')}{some}:"
    shown = [
        f"  {len(cause.ids)} × {cause.sentence.splitlines()[0][:200]} ({', '.join(cause.rules)})"
        for cause in mine[:most]
    ]
    return [(text, {}) for text in (head, *shown)]


def _features(rows: Sequence[FeatureResult], what: str, width: int) -> list[str]:
    """Return a line for each pair of declared and observed, one for each wrong declaration, and one for the
    features that are declared supported and that no case has tested. `what`: what left out cases that do.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.cases and row.observed != "not selected":
            groups.setdefault((row.declared, row.observed), []).append(row.name)
    order = sorted(groups.items(), key=lambda group: (not _surprises(*group[0]), -len(group[1])))
    lines = [("declared", "observed", "features")] if groups else []
    for (declared, observed), names in order[:_MOST_PAIRS]:
        lines.append((declared, observed, f"{len(names)}: {' '.join(names)}"))
    widths = [max((len(line[n]) for line in lines), default=0) for n in range(2)]
    texts = [f"{line[0].ljust(widths[0])}  {line[1].ljust(widths[1])}  {line[2]}" for line in lines]
    texts += [f"  {row.rule}: {row.sentence}" for row in rows if row.rule][:_MOST_WRONG]
    if names := [row.name for row in rows if (row.declared, row.observed) == ("supported", "not selected")]:
        texts.append(f"not tested in this {what}: {' '.join(names)}")
    return [line for text in texts for line in _wrap(text, width)]


def _not_applicable(report: Report, width: int) -> str:
    """Return one line: how many cases of each tier were not applicable, and the features that are declared
    unsupported and that these cases need; "" if there are none.
    """
    tiers: dict[str, list[bool]] = {}
    names: dict[str, None] = {}
    for result in report.results:
        left_out = result.outcome is Outcome.NOT_APPLICABLE
        tiers.setdefault(result.id.removeprefix("kv::").split("/")[0], []).append(left_out)
        if left_out:
            names.update((name, None) for name in result.features if report.subject.features.get(name))
    parts = [
        f"{tier} {sum(found)} of {len(found)}"
        for tier, found in sorted(tiers.items(), key=lambda item: tier_order(item[0]))
        if any(found)
    ]
    if not parts:
        return ""
    text = f"not applicable: {', '.join(parts)}" + (f" (unsupported: {' '.join(names)})" if names else "")
    return _cut(text, width)


def _wrap(text: str, width: int) -> list[str]:
    """Return a text as lines of this width. Names stay whole, since a file or a log has no other copy."""
    return textwrap.wrap(
        text, max(width, 40), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= max(width, 40) else text[: max(width, 40) - 3] + "..."


def _surprises(declared: str, observed: str) -> bool:
    """Whether the observation contradicts the declaration, or decides nothing."""
    return (declared, observed) not in (
        ("supported", "works"),
        ("unsupported", "refused"),
    ) and observed != "not looked at"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


# ---- the table: rows are modules, columns are cells grouped by family -------------------------------------

Place = tuple[str, str, str]  # module, family, topology


def _place(name: str) -> Place:
    module, _, words = name.removeprefix("kv::").partition("::")
    family, topology, *_ = [*words.partition("[")[2].rstrip("]").split("-"), "", ""]
    return module, family, topology


def _table(report: Report, width: int) -> list[str]:
    signs: dict[Place, list[str]] = {}
    done = set()
    for result in report.results:
        done.add(result.id)
        signs.setdefault(_place(result.id), []).append(_SIGNS[result.outcome])
    for name in report.selection.selected:
        if name not in done:
            signs.setdefault(_place(name), []).append("?")
    if not signs:
        return []
    by_module = len({module for module, _, _ in signs}) <= _MOST_ROWS

    def row_of(place: Place) -> str:
        return place[0] if by_module else place[0].split("/")[0]

    # from fine to coarse: the first table that fits is shown
    columns: tuple[Callable[[Place], tuple[str, str]], ...] = (
        lambda place: (place[1], place[2]),
        lambda place: (place[1], ""),
        lambda place: ("all", ""),
    )
    for column_of in columns:
        rows = _grid(signs, row_of, column_of)
        if max(map(len, rows)) <= width:
            break
    return rows


def _grid(
    signs: dict[Place, list[str]],
    row_of: Callable[[Place], str],
    column_of: Callable[[Place], tuple[str, str]],
) -> list[str]:
    found: dict[tuple[str, tuple[str, str]], list[str]] = {}
    for place, marks in signs.items():
        found.setdefault((row_of(place), column_of(place)), []).extend(marks)
    rows = sorted({row_of(place) for place in signs}, key=lambda row: (tier_order(row.split("/")[0]), row))
    columns = sorted({column_of(place) for place in signs})
    body = [[_marks(found.get((row, column), ())) for column in columns] for row in rows]
    families = [
        family if n == 0 or columns[n - 1][0] != family else "" for n, (family, _) in enumerate(columns)
    ]
    head = [families] + (
        [[topology for _, topology in columns]] if any(topology for _, topology in columns) else []
    )
    first = max(map(len, rows))
    widths = [max(len(line[n]) for line in [*head, *body]) for n in range(len(columns))]
    return [
        "  ".join(
            [name.ljust(first), *(text.ljust(size) for text, size in zip(line, widths, strict=True))]
        ).rstrip()
        for name, line in zip([""] * len(head) + rows, head + body, strict=True)
    ]


def _marks(marks: Iterable[str]) -> str:
    marks = list(marks)
    return (
        " ".join(
            f"{marks.count(sign)}{sign}" for sign in dict.fromkeys((*_SIGNS.values(), "?")) if sign in marks
        )
        or "·"
    )
