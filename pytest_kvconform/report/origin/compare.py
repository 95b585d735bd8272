"""Whether the manifest of a report is that of the suite that made it, and what is new since.

Whoever edits a report can drop cases from its manifest. So the manifest of the suite is looked up where the
report has no say: in the suite that is installed, in the list of releases (releases.toml), or in the history
of the checkout in which this suite lies.
"""

from __future__ import annotations

import functools
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pytest_kvconform.report.document import Report, is_of_this_suite
from pytest_kvconform.report.failure import compress_ids
from pytest_kvconform.report.origin import commits, manifest
from pytest_kvconform.report.origin.manifest import Manifest
from pytest_kvconform.settings import Settings

RELEASES = Path(__file__).with_name("releases.toml")
_LIST_S = 120.0  # for `kvconform list manifest` of another commit
_MOST = 20  # lines of ids that are shown


class Unknown(Exception):
    """The manifest of a suite is not known here. The message is one sentence, with what to do."""


def suite_of(report: Report) -> str:
    """The suite that made a report, in words."""
    commit = report.commits.get("suite", "")
    return f"suite {report.suite}" + (f" of commit {commit}" if commit else "")


def problems(report: Report) -> Iterator[str]:
    """Yield a sentence for each way in which the manifest is not that of the suite that made the report.

    Raises Unknown if nothing tells which manifest that suite has.
    """
    if report.manifest is None:
        raise Unknown(
            f"{suite_of(report)} made the report before suites wrote the manifest of their cases into it, so "
            "that nobody can tell which cases it had: make it again"
        )
    matrix = str(report.settings["matrix"].value)
    if (digest := releases().get(report.suite)) is not None and matrix == Settings.matrix:
        if digest != report.manifest.digest:
            yield f"the manifest is not that of release {report.suite}: its digest is not {digest}"
        return
    if report.manifest == (own := manifest.of_suite(matrix)):
        return
    right = own if is_of_this_suite(report) and _is_clean(report) else _of_commit(report, matrix)
    yield from _differences(report.manifest, right)


def _is_clean(report: Report) -> bool:
    """Whether version or commit tell exactly which suite made the report."""
    commit = report.commits.get("suite", "")
    return commits.is_commit(commit) if commit else not commits.needs_commit(report.suite)


def _differences(given: Manifest, right: Manifest) -> Iterator[str]:
    ours, theirs = right.by_id, given.by_id
    lacking, strange = sorted(ours.keys() - theirs), sorted(theirs.keys() - ours)
    if lacking:
        yield f"{len(lacking)} cases of the suite are not in the manifest, the first is {lacking[0]}"
    if strange:
        yield f"{len(strange)} cases of the manifest are not in the suite, the first is {strange[0]}"
    for name in sorted(ours.keys() & theirs):
        for key in ("rule", "level", "features", "limits"):
            if getattr(ours[name], key) != getattr(theirs[name], key):
                yield f"{name}: {key} of the manifest is not {key} of the case"
    for what in ("rules", "features", "settings"):
        if getattr(given, what) != getattr(right, what):
            yield f"manifest.{what} are not those of the suite"


@functools.cache
def releases() -> dict[str, str]:
    """Return version -> digest of the manifest of the default matrix, of each release."""
    return msgspec.toml.decode(RELEASES.read_bytes(), type=dict[str, str])


# ---- the history of a checkout ----------------------------------------------------------------------------


def _of_commit(report: Report, matrix: str) -> Manifest:
    """Return the manifest of the commit that a report names. Raises Unknown."""
    commit, found = report.commits.get("suite", ""), suite_of(report)
    if not commit:
        raise Unknown(
            f"{found} made the report, and it is neither this suite nor in its list of releases: ask a later "
            "release, or that suite itself"
        )
    if not commits.is_commit(commit):
        raise Unknown(f"{found} made the report, with changes that no commit has: nobody has its cases")
    if commits.git(commits.SUITE, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        raise Unknown(
            f"{found} made the report, and that commit is not in the history of this suite: verify it in a "
            "checkout of the project that has it (git fetch --unshallow, git pull)"
        )
    return _listed(commit, matrix)


@functools.cache
def _listed(commit: str, matrix: str) -> Manifest:
    """Return what `kvconform list manifest` of a commit prints. Raises Unknown.

    The commit is in the history of this suite, so its code is no stranger's.
    """
    names = [package.name for package in commits.PACKAGES]
    root = commits.SUITE.parent
    archive = commits.git(root, "archive", "--format=tar", commit, *names)
    if archive is None:
        raise Unknown(f"git has no {' and '.join(names)} of commit {commit}")
    with tempfile.TemporaryDirectory(prefix="kvconform-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-P", "-m", "pytest_kvconform.cli", "list", "manifest", "--matrix", matrix]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_LIST_S,
                check=True,
            )
            return msgspec.json.decode(done.stdout, type=Manifest)
        except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
            raise Unknown(f"commit {commit} does not print its manifest: kvconform list manifest") from None


# ---- what is new ------------------------------------------------------------------------------------------


def made_by(report: Report) -> list[str]:
    """Return lines about the suite that made a report, whose manifest is its own: which one it was, and what
    is new in this one, with numbers and ids. Empty if this one made it.
    """
    assert report.manifest is not None
    own = manifest.of_suite(str(report.settings["matrix"].value))
    if report.manifest == own:
        same = f"{suite_of(report)} made it, whose cases are those of this suite"
        return [] if is_of_this_suite(report) else [same]
    ours, theirs = own.by_id, report.manifest.by_id
    rules, their_rules = own.by_rule, report.manifest.by_rule
    changed = [name for name in ours.keys() & theirs if _belongs(ours[name]) != _belongs(theirs[name])]
    lines = [f"{suite_of(report)} made it, with all of its {len(theirs)} cases; this suite has {len(ours)}:"]
    for ids, what in (
        ({*own.features}.difference(report.manifest.features), "new feature"),
        (rules.keys() - their_rules, "new rule"),
        (their_rules.keys() - rules, "rule less"),
        ([id for id in rules.keys() & their_rules if rules[id] != their_rules[id]], "rule that has changed"),
        (ours.keys() - theirs, "new case"),
        (theirs.keys() - ours, "case less"),
        (changed, "case that has changed"),
    ):
        if not ids:
            continue
        words = what if len(ids) == 1 else re.sub(r"(feature|rule|case)(?: (that) has)?", _plural, what)
        shown = compress_ids(sorted(ids))
        lines += [f"  {len(ids)} {words}:", *(f"    {line}" for line in shown[:_MOST])]
        if len(shown) > _MOST:
            lines.append(f"    and {len(shown) - _MOST} more lines")
    return lines


def _plural(match: re.Match[str]) -> str:
    return f"{match[1]}s" + (" that have" if match[2] else "")


def _belongs(group: manifest.Cases) -> object:
    return msgspec.structs.replace(group, ids=())
