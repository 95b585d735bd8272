"""Where the commands of a pipeline run in tests: an empty folder, with the commands of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.fixtures import ROOT

OURS = {
    name: f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n'
    for name, module in (("kvconform", "pytest_kvconform.cli"), ("pytest", "pytest"))
}


class Shell:
    """A folder and the programs of its PATH. `programs`: name -> text, besides or instead of `OURS`."""

    def __init__(self, folder: Path, programs: Mapping[str, str] = {}, **variables: str):
        self.folder, bin = folder, folder / "bin"
        bin.mkdir()
        for name, text in (OURS | dict(programs)).items():
            (bin / name).write_text(text)
            (bin / name).chmod(0o755)
        keep = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KVCONFORM_", "PYTEST_")) and name not in ("CI", "GITHUB_STEP_SUMMARY")
        }
        self.environment = keep | {
            "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONIOENCODING": "utf-8",
            **variables,
        }

    def __call__(self, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command as CI does: bash ends at the first error."""
        return subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=self.folder,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
