"""The report as a page for people: one HTML file, drawn from `report.json` alone.

The page loads nothing. Style and script stand in it, and its policy lets the browser run this script and no
other. Jinja2 escapes every text. The results are JSON in a block of data: the script shows them as text and
never as HTML. What a person needs without the script, or on paper, is written as plain HTML: the verdict, the
levels, the table of cells, the causes with their first case.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from importlib import resources
from pathlib import Path

from pytest_kvconform import __version__, rules
from pytest_kvconform.report.document import Report
from pytest_kvconform.report.failure import settings_of
from pytest_kvconform.report.files import write_file
from pytest_kvconform.report.page import contents, transfers
from pytest_kvconform.report.terminal import left_out_here, title

FILE = "report.html"
_TITLE = "· KV conformance ·"  # in every page, see `terminal.title`


def render(report: Report) -> str:
    """Return the page. Sentences of rules come from the suite, if it has the version of the report."""
    import jinja2  # here, so that a run without a page does not load it

    known = rules.load() if report.suite == __version__ else {}
    settings = settings_of(report)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": True}
    style, script = _asset("page.css"), _asset("page.js")
    return environment.get_template("page.html").render(
        report=report,
        verdict=report.verdict,
        title=title(report),
        worst_first=contents.worst_first,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        levels=contents.levels_that_ran(report),
        families=contents.families(report),
        causes=contents.causes(report, known, settings),
        accuracy=contents.accuracy(report),
        plot=transfers.plot(report),
        transfers=transfers.by_family(report),
        left_out=left_out_here(report),
        set_by_user=contents.set_by_user(report),
        results=contents.results(report, known, settings),
    )


def write(report: Report, path: Path) -> Path:
    """Write the page. A reader sees the old file or the whole new one. Raises OSError."""
    return write_file(path, render(report).encode())


def remove(path: Path) -> None:
    """Remove a page, which shows an earlier report. A file that is no page of this suite stays."""
    with contextlib.suppress(OSError):
        with path.open("rb") as file:
            ours = _TITLE.encode() in file.read(4096)
        if ours:
            path.unlink()


def _asset(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return how a policy of the browser (CSP) names this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
