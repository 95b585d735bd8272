"""The commit of the suite and of a connector, where a git checkout or pip's records tell it.

A commit is 40 or 64 hexadecimal digits, and `CHANGED` after them if files differ from the commit. No code of
a checkout runs: git starts neither a hook nor a file system monitor.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import subprocess
from pathlib import Path

import msgspec

import model_matrix
import pytest_kvconform

CHANGED = "-dirty"  # as `git describe --dirty` writes it
SUITE = Path(pytest_kvconform.__file__).parent
PACKAGES = (SUITE, Path(model_matrix.__file__).parent)  # the cases of a suite follow from these
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
_GIT_S = 60.0  # for one command
_RECORD = "direct_url.json"  # of a distribution that pip did not take from an index (PEP 610)


def is_commit(text: str) -> bool:
    """Whether this is a commit, and no file differed from it."""
    return _COMMIT.fullmatch(text) is not None


def needs_commit(version: str) -> bool:
    """Whether a version of the suite is of no release, so that the commit alone tells which suite it is."""
    return ".dev" in version


def lacks_commit(commit: str) -> str:
    """What a suite has in place of a commit, in words. `commit`: what is known of it."""
    return f"changes that no commit has ({commit})" if commit else "no commit that git or pip could tell"


def git(folder: Path, *arguments: str) -> bytes | None:
    """Return what git writes in a folder; None if it fails, or is not installed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            [*_GIT, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@functools.cache
def of_suite() -> str:
    """Return the commit of the suite; "" if it is not known, as that of a release from an index."""
    return _of_checkout(SUITE / "__init__.py", *PACKAGES) or _of_distribution("pytest-kvconform")


def of_connector(file: str) -> str:
    """Return the commit of the package that has the file of a connector's class; "" if it is not known."""
    if not file:
        return ""
    path = top = Path(file).resolve()
    while (top.parent / "__init__.py").exists():
        top = top.parent
    if commit := _of_checkout(path, top):
        return commit
    names = importlib.metadata.packages_distributions().get(top.stem, [])
    return next(filter(None, map(_of_distribution, names)), "")


def _of_checkout(file: Path, *packages: Path) -> str:
    """Return the commit of the checkout that a file is part of. `packages`: whose changes count."""
    if git(file.parent, "ls-files", "--error-unmatch", "--", str(file)) is None:
        return ""  # an environment may lie in the checkout of something else
    head = git(file.parent, "rev-parse", "HEAD")
    changes = git(file.parent, "status", "--porcelain", "--untracked-files=no", "--", *map(str, packages))
    if head is None or changes is None:
        return ""
    return head.decode().strip() + (CHANGED if changes.strip() else "")


def _of_distribution(name: str) -> str:
    """Return the commit from which pip has installed a distribution."""
    try:
        record = importlib.metadata.distribution(name).read_text(_RECORD)
        found = msgspec.json.decode(record or "{}").get("vcs_info", {}).get("commit_id", "")
    except (importlib.metadata.PackageNotFoundError, msgspec.MsgspecError, AttributeError):
        return ""
    return found if isinstance(found, str) and is_commit(found) else ""
