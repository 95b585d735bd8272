"""One report of all shards of a run, as the run without `--kv-shard` would have written it.

The shards have to be of one run: same suite, packages, settings and subject. Otherwise, or if a shard is
missing or there twice, nothing is merged. The verdict is decided from all results together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pytest_kvconform.apply_declaration import apply_again
from pytest_kvconform.declaration import KnownFailure
from pytest_kvconform.report.consistency import inconsistencies
from pytest_kvconform.report.digest import altered
from pytest_kvconform.report.document import FILE, Report, Setting, criteria_of, shard_of, with_verdict
from pytest_kvconform.settings import Settings
from pytest_kvconform.shards import numbers
from pytest_kvconform.subject import Subject

_OF_A_SHARD = ("shard", "report")  # settings that differ between the shards of a run
_OF_A_MACHINE = ("file", "mended")  # facts with paths, which differ between machines
_MOST = 60  # characters of a value that a sentence shows


class BadShards(ValueError):
    """Error: the reports are not the shards of one run. The message is one sentence."""


class Shard(NamedTuple):
    """A report, and where it was found."""

    path: Path
    report: Report

    @property
    def number(self) -> int:
        return numbers(shard_of(self.report))[0]

    @property
    def of(self) -> int:
        return numbers(shard_of(self.report))[1]


def merge(shards: Sequence[Shard], folder: str = "") -> Report:
    """Return the report of the whole run. Raises BadShards.

    `folder`: where the report will be, if the user named it.
    """
    for one in shards:
        if not shard_of(one.report):
            raise BadShards(f"{one.path} is no shard: its run had no --kv-shard")
        if sentences := inconsistencies(one.report):
            raise BadShards(f"{one.path} does not follow from its results: {sentences[0]}")
        if sentence := altered(one.path / FILE if one.path.is_dir() else one.path):
            raise BadShards(f"{one.path}: {sentence}")
    first = shards[0]
    for other in shards[1:]:
        if difference := next(differences(first.report, other.report), ""):
            raise BadShards(f"{first.path} and {other.path} are not of one run: {difference}")
    _require_all(shards)
    _require_one_division(shards)
    reports = [one.report for one in shards]
    results = [result for report in reports for result in report.results]
    whole = msgspec.structs.replace(
        first.report,
        settings=first.report.settings | {key: _whole(key, folder) for key in _OF_A_SHARD},
        subject=msgspec.structs.replace(first.report.subject, known=_latest(reports)),
        day=min((report.day for report in reports if report.day), default=None),
        facts=next((report.facts for report in reports if report.facts is not None), None),
        selection=msgspec.structs.replace(
            first.report.selection,
            selected=tuple(sorted(name for report in reports for name in report.selection.selected)),
            elsewhere=(),
        ),
        results=tuple(sorted(results, key=lambda result: result.id)),
        troubles=tuple(sorted(sentence for report in reports for sentence in report.troubles)),
    )
    criteria = criteria_of(whole)  # a known failure may have expired at midnight
    results = [apply_again(result, criteria) for result in whole.results]
    return with_verdict(msgspec.structs.replace(whole, results=tuple(results)))


def _whole(key: str, folder: str) -> Setting:
    """Return the setting of the whole run."""
    if key == "report" and folder:
        return Setting(value=folder, origin="command line")
    return Setting(value=getattr(Settings, key), origin="default")


def _latest(reports: Sequence[Report]) -> tuple[KnownFailure, ...]:
    """Return the known failures as of the last day on which a shard ran: a run may pass midnight."""
    return max(
        (report.subject.known for report in reports), key=lambda known: [str(one.day) for one in known]
    )


def _require_all(shards: Sequence[Shard]) -> None:
    """Raise BadShards unless each shard is there once."""
    for one, other in combinations(shards, 2):
        if one.of != other.of:
            raise BadShards(
                f"{one.path} is shard {one.number}/{one.of}, and {other.path} is shard "
                f"{other.number}/{other.of}: give the shards of one division"
            )
        if one.number == other.number:
            raise BadShards(f"shard {one.number}/{one.of} is there twice: {one.path} and {other.path}")
    of = shards[0].of
    if missing := sorted(set(range(1, of + 1)) - {one.number for one in shards}):
        names = ", ".join(f"{number}/{of}" for number in missing)
        what = f"shard {names} is" if len(missing) == 1 else f"shards {names} are"
        raise BadShards(f"{what} missing: give all {of}")


def _require_one_division(shards: Sequence[Shard]) -> None:
    """Raise BadShards if a case of one shard is not what the others call a case of another shard."""
    for one in shards:
        for other in shards:
            strange = set(other.report.selection.selected) - set(one.report.selection.elsewhere)
            if other is not one and strange:
                raise BadShards(
                    f"{other.path} has {min(strange)}, which {one.path} does not leave to another shard"
                )


def differences(one: Report, other: Report, but: Sequence[str] = _OF_A_SHARD) -> Iterator[str]:
    """Yield a sentence for each thing that is the same in all shards of a run, and differs here.

    `but`: settings that may differ.
    """
    if one.suite != other.suite:
        yield f"the suite is {one.suite} in one and {other.suite} in the other"
    yield from _differing("the commit of the ", one.commits, other.commits)
    if one.manifest != other.manifest:
        yield "the manifest differs, so the suites do"
    yield from _differing("", one.environment, other.environment)
    yield from _differing("setting ", _values(one), _values(other), but)
    yield from _differing("subject.", _fields(one.subject), _fields(other.subject))
    if one.facts is not None and other.facts is not None:
        yield from _differing("facts.", one.facts, other.facts, _OF_A_MACHINE)
    for name in ("manifest", "limits", "not_installed"):
        if getattr(one.selection, name) != getattr(other.selection, name):
            yield f"selection.{name} differs, so their machines or packages do"
    if one.should != other.should:
        yield "the rules of strength SHOULD differ"


def _differing(
    what: str, one: dict[str, Any], other: dict[str, Any], but: Sequence[str] = ()
) -> Iterator[str]:
    for key in sorted(one | other):
        was, now = one.get(key), other.get(key)
        if key not in but and was != now:
            yield f"{what}{key} is {_shown(was)} in one and {_shown(now)} in the other"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def _values(report: Report) -> dict[str, Any]:
    return {key: setting.value for key, setting in report.settings.items()}


def _fields(subject: Subject) -> dict[str, Any]:
    """Return the fields of a subject, without the day on which known failures were judged."""
    known = tuple(msgspec.structs.replace(entry, day=None) for entry in subject.known)
    return {name: getattr(subject, name) for name in subject.__struct_fields__} | {"known": known}
