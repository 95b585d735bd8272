"""Summary of a run in Markdown, for the page of a CI job."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_kvconform.report.document import Report
from pytest_kvconform.report.failure import compress_ids
from pytest_kvconform.report.terminal import left_out_here, title, what_ran

_MOST = 10


def job_summary(report: Report) -> str:
    """Return headline, verdict, levels, counts and causes.

    The text ends with a blank line, because other steps append to the same file.
    """
    verdict = report.verdict
    word = verdict.headline.removesuffix(verdict.sentence).strip()
    lines = [
        f"### {title(report)}",
        "",
        f"**{word.rstrip(':')}**{word[len(word.rstrip(':')) :]} {verdict.sentence}",
        "",
    ]
    if verdict.levels:
        lines += ["| level | verdict | cases |", "|---|---|---|"]
        lines += [_row(one.name, one.word, _counts(one.counts) or "-") for one in verdict.levels]
        lines.append("")
    if verdict.counts:
        lines += [_counts(verdict.counts), ""]
    for line in (*what_ran(report), *left_out_here(report)):
        lines += [line, ""]
    if any(row.cases for row in verdict.features):
        lines += ["| feature | declared | observed | |", "|---|---|---|---|"]
        lines += [
            _row(
                row.name,
                f"{row.declared}: {row.reason}" if row.reason else row.declared,
                row.observed,
                row.sentence,
            )
            for row in verdict.features
        ]
        lines.append("")
    if verdict.causes:
        lines += ["| outcome | cases | cause | rules | first |", "|---|---|---|---|---|"]
        for cause in verdict.causes[:_MOST]:
            lines.append(
                _row(
                    cause.outcome.value,
                    len(cause.ids),
                    cause.sentence,
                    ", ".join(cause.rules),
                    f"`{compress_ids(cause.ids)[0]}`",
                )
            )
        if len(verdict.causes) > _MOST:
            lines.append(f"\n{len(verdict.causes) - _MOST} more causes are in the report.")
    return "\n".join(lines).rstrip() + "\n\n"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def _row(*words: object) -> str:
    return "| " + " | ".join(str(word).replace("|", "\\|").replace("\n", " ") for word in words) + " |"
