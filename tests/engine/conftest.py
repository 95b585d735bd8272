"""One zygote for all tests of this folder, and the command itself where a test is about the command."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed

from .broken_modules import BROKEN
from .command import Command, Run, arguments


@pytest.fixture(scope="package", autouse=True)
def _installed() -> None:
    """These tests run real engines, most of them through the command."""
    must_be_installed()


@pytest.fixture(scope="package")
def case_runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseRunner]:
    """One zygote, from which the engines of every test are forked."""
    broken = tmp_path_factory.mktemp("broken")
    for name, (source, _) in BROKEN.items():
        (broken / f"{name}.py").write_text(source)
    with importable_from(ROOT, broken):
        case_runner = CaseRunner(matrix="full")
        yield case_runner
    assert case_runner.close() == []


@pytest.fixture(scope="package")
def run_cases(case_runner: CaseRunner) -> Callable[..., CellRun]:
    """run_cases("MovesNothing", "llama", variants="n200") -> what each case says; see `CaseRunner.run`."""
    return case_runner.run


def _runs(folder: Path) -> Iterator[Run]:
    """A function that begins runs; what they leave is killed in the end."""
    runs: list[Command] = []
    numbers = itertools.count()

    def begin(spec: str, *more: str, cold: bool = False) -> Command:
        own = folder / str(next(numbers))
        own.mkdir()
        runs.append(Command(own, *arguments(spec, *more), cold=cold))
        return runs[-1]

    yield begin
    for run in runs:
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)
        run.process.wait(10)
        shutil.rmtree(run.temporary, ignore_errors=True)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Run]:
    """begin("module:Right", "-k", "n64") -> a run of the command that has just begun."""
    yield from _runs(tmp_path)


@pytest.fixture
def command(begin: Run) -> Run:
    """command("module:Right", "-k", "n64") -> a run of the command that came to its end."""
    return lambda spec, *more: begin(spec, *more).wait()


@pytest.fixture(scope="package")
def command_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Like `command`, for runs that several tests look at."""
    for begin in _runs(tmp_path_factory.mktemp("once")):
        yield lambda spec, *more, begin=begin: begin(spec, *more).wait()


@pytest.fixture(scope="package")
def nixl_on_llama(command_once: Run) -> Command:
    """The whole suite on NixlConnector and the dense family."""
    return command_once("NixlConnector")
