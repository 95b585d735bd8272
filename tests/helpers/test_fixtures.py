"""Folders of modules of connectors are importable as long as the fixture that added them lasts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.fixtures import importable_from


@pytest.mark.parametrize("before", ["", "/before"])
def test_the_folder_that_came_first_may_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """pytest ends the fixture of a file before that of its package, which may have begun in the file."""
    monkeypatch.setenv("PYTHONPATH", before)
    here = list(sys.path)
    first, second = tmp_path / "first", tmp_path / "second"
    of_file, of_package = importable_from(first, second), importable_from(second)
    of_file.__enter__()
    of_package.__enter__()
    of_file.__exit__(None, None, None)
    assert sys.path == [*here, str(second)]
    assert os.environ["PYTHONPATH"] == os.pathsep.join([str(second), *filter(None, [before])])
    of_package.__exit__(None, None, None)
    assert sys.path == here
    assert os.environ.get("PYTHONPATH", "") == before
