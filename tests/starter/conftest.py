"""Runs of the suite's cases on the connector that `kvconform new` writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_kvconform import starter
from tests.helpers.case_runner import CaseRunner
from tests.helpers.fixtures import importable_from, must_be_installed


@pytest.fixture(scope="module")  # test_whole.py needs the name to be free
def my_connector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseRunner]:
    """The tier protocol, on a connector in a folder of its own."""
    must_be_installed()
    folder: Path = tmp_path_factory.mktemp("new")
    starter.write("my_connector", folder)
    with importable_from(folder):
        runner = CaseRunner("my_connector", "protocol")
        yield runner
    assert runner.close() == []
