"""A few lines of Markdown for the summary page of a CI job."""

from __future__ import annotations

from pytest_kvconform.report.document import Report
from pytest_kvconform.report.failure import compress
from pytest_kvconform.report.terminal import title

_MOST = 10


def markdown(report: Report) -> str:
    """Headline, verdict, counts and causes. Ends with a blank line, because other steps append to the same file."""
    verdict = report.verdict
    lines = [f"### {title(report)}", "", f"**{verdict.word}**: {verdict.sentence}", ""]
    if verdict.counts:
        lines += [", ".join(f"{count} {outcome}" for outcome, count in verdict.counts.items()), ""]
    if len(report.selection.selected) < report.selection.total:
        lines += [f"Selection: {len(report.selection.selected)} of {report.selection.total}", ""]
    if verdict.causes:
        lines += ["| outcome | cases | cause | rules | first |", "|---|---|---|---|---|"]
        for cause in verdict.causes[:_MOST]:
            words = (cause.outcome.value, len(cause.ids), cause.sentence, ", ".join(cause.rules), f"`{compress(cause.ids)[0]}`")
            lines.append("| " + " | ".join(str(word).replace("|", "\\|").replace("\n", " ") for word in words) + " |")
        if len(verdict.causes) > _MOST:
            lines.append(f"\n{len(verdict.causes) - _MOST} more causes are in the report.")
    return "\n".join(lines).rstrip() + "\n\n"
