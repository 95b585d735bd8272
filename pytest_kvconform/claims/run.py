"""`kvconform claim`: a pytest for each seed, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from pytest_kvconform import __version__
from pytest_kvconform.claims import is_fixed
from pytest_kvconform.claims.isolation import arguments, environment
from pytest_kvconform.claims.reports import folder_of
from pytest_kvconform.report.origin import commits
from pytest_kvconform.settings import BadSetting, load, non_default

# the verdicts of a run, the worst first: the exit code of all runs is the first of them that occurs
_WORST_FIRST = (11, 1, 10, 0)


def run(connector: str, seeds: Iterable[int], folder: Path, jobs: int) -> int:
    """Run the suite once for each seed, and return the exit code of the worst run.

    Raises BadSetting if a setting is not what a claim fixes, or if nothing tells which suite this is. A code
    of pytest itself (2 to 6) ends all.
    """
    root = Path.cwd()
    given = {"kv_connector": connector or None}
    settings = load(given, os.environ, root)
    if not settings.connector:
        raise BadSetting("claim: name the connector: --connector=NAME, or MODULE:CLASS")
    for option, value, origin in non_default(settings):
        if is_fixed(option.name) and value != option.default:
            place = f"{option.key} of pyproject.toml" if origin == "pyproject.toml" else origin
            raise BadSetting(f"claim: {place} is set, and a claim has the default of {option.key}: remove it")
    if commits.needs_commit(__version__) and not commits.is_commit(commit := commits.of_suite()):
        raise BadSetting(
            f"claim: this suite, {__version__}, is of no release, and has {commits.lacks_commit(commit)}: "
            "commit what has changed, or install a release, so that others find its cases again"
        )
    codes = []
    for seed in seeds:
        report = folder_of(folder, seed)
        asked = [f"--kv-connector={settings.connector}", f"--kv-seed={seed}", f"--kv-report={report}"]
        # -P: no module of the current folder takes the place of another one
        command = [sys.executable, "-P", "-m", "pytest", *arguments(root, jobs), "--kv-claim", *asked, "kv::"]
        done = subprocess.run(command, env=environment(os.environ), check=False)
        codes.append(done.returncode)
        if done.returncode not in _WORST_FIRST:
            return done.returncode if done.returncode > 0 else 128 - done.returncode
    return next(code for code in _WORST_FIRST if code in codes)
