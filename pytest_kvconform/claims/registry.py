"""Entries of `registry/`: results of connectors of others, one file each, and the table that shows them.

An entry is the predicate of a claim, with the project, its commit, and the command that makes the claim
again. `kvconform register` writes it from a claim that verifies. The predicate has the SHA-256 of each
report, so an entry that was made up is found when somebody compares them with the reports.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from pytest_kvconform import declaration
from pytest_kvconform.claims import DAYS, SEEDS, badge
from pytest_kvconform.report.document import BadReport, Report
from pytest_kvconform.result import LEVELS

FOLDER = "registry"
_MOST = 300  # characters of a command
_PATTERNS = {  # texts that the table shows
    "project": r"https://[\w.-]+(/[\w.-]+)+",
    "commit": r"[0-9a-f]{40}|[0-9a-f]{64}",
    "reproduce": rf"(?!\s)[^`\x00-\x1f\x7f]{{1,{_MOST}}}",
    "claim.connector": r"[\w.]+(:\w+)?",
    "claim.suite": r"[\w.+]+",
    "claim.vllm": r"\d+\.\d+[\w.+]*",
    "claim.device": r"\w+",
}


class File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The digest of a file."""

    sha256: str


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of a claim."""

    seed: int
    day: datetime.date
    verdict: Literal["CONFORMS", "VIOLATES"]
    report: File = msgspec.field(name="report.json")


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The predicate of a claim, as badge.py writes it."""

    schema: Literal["kvconform-claim/v1"]
    suite: str
    commits: dict[str, str] = {}  # of the suite and of the connector's package, as far as they are known
    connector: str
    config: dict[str, Any]
    vllm: str
    device: str
    kernels: Any
    environment: dict[str, str | None]
    unsupported: dict[str, str]
    levels: dict[str, Literal["CONFORMS", "VIOLATES", "NOT-APPLICABLE"]]
    expires: datetime.date
    reports: tuple[Run, ...]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One result."""

    project: str  # URL of its repository
    commit: str  # of the project, whose claim this is
    reproduce: str  # the command that makes the claim again, in a checkout of that commit
    claim: Claim

    @property
    def file(self) -> str:
        """The name of its file: a later result of the same connector takes the place of an earlier one."""
        claim = self.claim
        minor = ".".join(claim.vllm.split(".")[:2])
        return f"{claim.connector.replace(':', '-')}-vllm-{minor}-{claim.device}.json"


def make(
    reports: Mapping[int, Report],
    hashes: Mapping[int, str],
    project: str,
    commit: str,
    reproduce: str,
    folder: Path,
) -> tuple[str, bytes]:
    """Return name and content of the entry of a claim that was verified, for a folder.

    Raises BadReport, also for an entry that would take the place of one of another project or of a newer one.
    """
    predicate = msgspec.json.decode(badge.files(reports, hashes)[badge.PREDICATE])
    raw = {"project": project, "commit": commit, "reproduce": reproduce, "claim": predicate}
    entry = _convert(msgspec.json.encode(raw), "the entry")
    if (path := folder / entry.file).exists():
        earlier = _convert(path.read_bytes(), str(path))
        if earlier.project != entry.project:
            raise BadReport(f"{path} is a result of {earlier.project}, which {entry.project} cannot replace")
        if earlier.claim.expires > entry.claim.expires:
            raise BadReport(f"{path} is newer: it holds until {earlier.claim.expires}")
    return entry.file, badge.as_json(raw)


def read(folder: Path) -> list[Entry]:
    """Return the entries of a folder, sorted by name. Raises BadReport for the first one that is none."""
    entries = []
    for path in sorted(folder.glob("*.json")):
        entry = _convert(path.read_bytes(), str(path))
        if path.name != entry.file:
            raise BadReport(f"{path}: its name must be {entry.file}")
        entries.append(entry)
    return entries


def _convert(content: bytes, name: str) -> Entry:
    try:
        entry = msgspec.json.decode(content, type=Entry)
    except msgspec.MsgspecError as error:
        raise BadReport(f"{name}: {error}") from None
    except RecursionError:
        raise BadReport(f"{name} is nested too deeply") from None
    if sentence := next(_problems(entry), ""):
        raise BadReport(f"{name}: {sentence}")
    return entry


def _problems(entry: Entry) -> Iterator[str]:
    claim = entry.claim
    for place, pattern in _PATTERNS.items():
        *outer, key = place.split(".")
        value = getattr(claim if outer else entry, key)
        if not re.fullmatch(pattern, value, re.ASCII):
            yield f"{place} is {value!r}, which does not fit {pattern}"
        if not value.isprintable():  # a browser would obey or hide such a character
            yield f"{place} is {value!a}, which has a character that is not printable"
    if (known := claim.commits.get("connector", entry.commit)) != entry.commit:
        yield f"commit is {entry.commit}, but the claim was made with the connector of {known}"
    if unknown := sorted({*claim.levels} - {*LEVELS}):
        yield f"claim.levels: there is no level {unknown[0]!r}"
    if not claim.levels:
        yield "claim.levels is empty: the claim shows nothing"
    if tuple(run.seed for run in claim.reports) != SEEDS:
        yield f"claim.reports: a claim has the seeds {', '.join(map(str, SEEDS))}"
    elif claim.expires != min(run.day for run in claim.reports) + datetime.timedelta(days=DAYS):
        yield f"claim.expires is not {DAYS} days after the first report"
    if any(run.day > declaration.today() for run in claim.reports):
        yield "claim.reports: a day is in the future"
    if ("VIOLATES" in claim.levels.values()) != any(run.verdict == "VIOLATES" for run in claim.reports):
        yield "claim.levels do not fit the verdicts of claim.reports"
    if not all(re.fullmatch(r"[0-9a-f]{64}", run.report.sha256) for run in claim.reports):
        yield "claim.reports: sha256 has 64 hexadecimal digits"


def rows(entries: list[Entry], today: datetime.date) -> list[tuple[str, ...]]:
    """Return a row of Markdown for each entry: connector, where it ran, levels, last day, command."""
    return [
        (
            f"[`{entry.claim.connector}`]({entry.project}), commit `{entry.commit[:12]}`",
            f"{entry.claim.vllm}, {entry.claim.device}",
            ", ".join(
                f"{level} {'**violates**' if word == 'VIOLATES' else word.lower().replace('-', ' ')}"
                for level, word in entry.claim.levels.items()
            ),
            f"{min(run.day for run in entry.claim.reports)}, suite {entry.claim.suite}",
            f"{'**expired** on' if entry.claim.expires < today else 'until'} {entry.claim.expires}",
            f"`{entry.reproduce}`",
        )
        for entry in entries
    ]
