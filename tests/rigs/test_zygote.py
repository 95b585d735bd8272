"""The zygote, as pytest's process sees it: modules to preload exist, and an early end is reported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvconform.rigs.launch import ENGINE_MODULES, GEOMETRY_MODULES, PRELOAD, Zygote


@pytest.mark.parametrize("module", [PRELOAD.partition(":")[0], *ENGINE_MODULES, *GEOMETRY_MODULES])
def test_modules_to_preload_exist(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("import sys; sys.stdin.read()", []),  # as while the zygote imports: it sees the end of its input
        ("raise SystemExit(3)", ["exit code 3"]),
        ("import os; os.kill(os.getpid(), 9)", ["exit code -9"]),
    ],
)
def test_an_early_end_is_reported(tmp_path: Path, code: str, ends: list[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    if ends:
        process.wait(10)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    name = f"the zygote (process {process.pid}, from which engines are forked)"
    assert Zygote(process, run_dir).close() == [f"{name} had ended before, with {end}" for end in ends]
    assert not run_dir.exists()
