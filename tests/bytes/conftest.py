"""One background process for all tests of this folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_kvconform.rigs.process_facts import descendants_of
from tests.engine.conftest import _installed  # noqa: F401 - these tests run real engines, too
from tests.engine.judged import Judged, Jury

ROOT = Path(__file__).parents[2]
GEOMETRIES = ("llama3_1_8b", "gemma3_1b", "kimi_k2_5_eagle3", "qwen3_5_35b_a3b")
END_S = 5.0  # that processes may take to be gone when a bench was closed


@pytest.fixture(scope="package")
def jury() -> Iterator[Jury]:
    """One zygote, from which the engines of every test are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT)])  # where the module of a connector is looked for first
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        jury = Jury("tests.bytes.wrong_connectors", "bytes", GEOMETRIES, "full")
        yield jury
    assert jury.close() == []


@pytest.fixture
def judge(jury: Jury) -> Iterator[Callable[..., Judged]]:
    """judge("SwapsPlanes", "llama3_1_8b", variants="n55") -> what each case says; see `Jury.judge`. No process of an engine stays."""
    yield lambda *args, **more: jury.judge(*args, setup="b16", **more)
    deadline = time.monotonic() + END_S
    while left := descendants_of(jury.zygote.process.pid):
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.02)
