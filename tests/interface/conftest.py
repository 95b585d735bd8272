"""One background process for all tests of this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import _installed  # noqa: F401 - these tests run vLLM's real scheduler and workers, too
from tests.engine.judged import Judged, Jury

ROOT = Path(__file__).parents[2]
GEOMETRIES = ("llama3_1_8b", "gemma3_1b", "qwen3_5_35b_a3b", "kimi_k2_5_eagle3")


@pytest.fixture(scope="package")
def jury() -> Iterator[Jury]:
    """One zygote, from which the host of every cell is forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT)])  # where the module of a connector is looked for first
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        jury = Jury("tests.interface.wrong_connectors", "interface", GEOMETRIES, "full")
        yield jury
    assert jury.close() == []


@pytest.fixture
def judge(jury: Jury) -> Callable[..., Judged]:
    """judge("KeepsAFile", "llama3_1_8b") -> what each case says; see `Jury.judge`."""
    return lambda *args, **more: jury.judge(*args, setup="b16", **more)
