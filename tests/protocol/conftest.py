"""One background process for all tests of this folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_kvconform.rigs.process_facts import descendants_of
from tests.engine.judged import Judged, Jury

ROOT = Path(__file__).parents[2]
GEOMETRIES = ("llama3_1_8b", "gemma3_1b", "qwen3_5_35b_a3b")
END_S = 5.0  # that processes may take to be gone when a bench was closed


@pytest.fixture(scope="package")
def jury() -> Iterator[Jury]:
    """One zygote, from which the hosts of every test are forked. `jury.module` says where connectors are found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT)])  # where the module of a connector is looked for first
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        jury = Jury("tests.protocol.wrong_connectors_scheduler", "protocol", GEOMETRIES, "full")
        yield jury
    assert jury.close() == []


@pytest.fixture
def judge(jury: Jury) -> Iterator[Callable[..., Judged]]:
    """judge("AnnouncesMore", "llama3_1_8b", only=...) -> what each case says; see `Jury.judge`. No process stays."""
    yield lambda *args, **more: jury.judge(*args, setup="b16", matrix="full", **more)
    deadline = time.monotonic() + END_S
    while left := descendants_of(jury.zygote.process.pid):
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.02)
