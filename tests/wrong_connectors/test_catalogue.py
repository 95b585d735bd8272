"""Each mistake is found by the cases about it, by no other case, and named. Right connectors pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from pytest_kvconform import plan
from tests.helpers import rings
from tests.helpers.case_runner import CaseRunner
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed, no_process_is_left
from tests.helpers.wrong import Record, Theme
from tests.wrong_connectors.catalogue import RECORDS
from tests.wrong_connectors.judging import deviations, run_record

PARAMS = [pytest.param(theme, theme, record, id=name) for name, theme, record in RECORDS]


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest) -> Iterator[CaseRunner]:
    """One zygote for all connectors of a theme."""
    must_be_installed()
    with importable_from(ROOT):
        runner = request.param.runner()
        yield runner
    assert runner.close() == []


@pytest.mark.parametrize(("runner", "theme", "record"), PARAMS, indirect=["runner"])
def test_a_connector_is_judged_as_its_record_says(
    runner: CaseRunner,
    theme: Theme,
    record: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    """At night, and where the file is named, more modules run."""
    if theme.minor:
        monkeypatch.setattr(plan, "version", lambda *names: theme.minor)
    with nullcontext() if theme.leaves else no_process_is_left(runner):
        run = run_record(theme, record, runner, tmp_path, rings.is_night(pytestconfig))
        found = deviations(theme, record, run)
        assert not found, "\n".join(found)
        msgspec.json.encode(run.results)  # as a report has it
