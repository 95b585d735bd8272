"""Git repositories of the tests, with a small suite that grows from commit to commit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import model_matrix
import pytest_kvconform
from tests.small_suite.runs import HERE

COPIED = (Path(pytest_kvconform.__file__).parent, Path(model_matrix.__file__).parent, HERE / "fakekv")


class Checkout:
    """A repository in a new folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=tests", "-c", "user.email=tests@example.org")
        command = ["git", *identity, "-c", "commit.gpgsign=false", *arguments]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout

    def commit(self) -> str:
        """Commit every file, and return the commit."""
        self.git("add", "--all")
        self.git("commit", "-q", "-m", "as it is")
        return self.git("rev-parse", "HEAD").strip()


class SuiteCheckout(Checkout):
    """The suite, and the small one in place of its cases."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        for package in COPIED:
            shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))

    @property
    def packages(self) -> tuple[Path, ...]:
        return tuple(self.folder / package.name for package in COPIED)

    def replace(self, file: str, old: str, new: str) -> None:
        """Change a file of the small suite."""
        path = self.folder / "fakekv" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
