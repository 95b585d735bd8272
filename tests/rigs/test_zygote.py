"""What is said of a background process that is no longer there when it is to be closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvconform.rigs.launch import Zygote


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.stdin.read()", []),  # as while it imports: it sees the end of its input
        ("raise SystemExit(3)", ["exit code 3"]),
        ("import os; os.kill(os.getpid(), 9)", ["exit code -9"]),
    ],
)
def test_an_end_that_nobody_asked_for_is_said(tmp_path: Path, code: str, said: list[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    if said:
        process.wait(10)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    words = Zygote(process, run_dir).close()
    assert words == [f"the background process {process.pid} had ended before, with {one}" for one in said]
    assert not run_dir.exists()
