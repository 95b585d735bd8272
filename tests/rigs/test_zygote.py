"""The zygote: modules to preload exist, an early end is reported, and sessions end with all processes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvconform.rigs.launch import ENGINE_MODULES, GEOMETRY_MODULES, PRELOAD, Zygote
from pytest_kvconform.rigs.processes import linux
from pytest_kvconform.rigs.processes.cores import Deadline


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


@pytest.mark.parametrize("lists_children", [True, False])
def test_every_process_of_a_session_is_killed(monkeypatch: pytest.MonkeyPatch, lists_children: bool) -> None:
    monkeypatch.setattr(linux, "LISTS_CHILDREN", lists_children and linux.LISTS_CHILDREN)
    shell = ["sh", "-c", "sleep 60 & (sleep 60 & wait) & echo; wait"]
    with (
        subprocess.Popen(shell, stdout=subprocess.PIPE, start_new_session=True) as leader,
        subprocess.Popen(["sleep", "60"], start_new_session=True) as other,
    ):
        assert leader.stdout
        leader.stdout.readline()
        deadline = Deadline(10.0)
        while len(linux.session_pids(leader.pid)) < 4 and not deadline.over():
            pass
        descendants = linux.descendants_of(leader.pid)
        assert sorted(linux.session_pids(leader.pid)) == sorted([leader.pid, *descendants])
        assert len(descendants) == 3
        linux.kill_session(leader.pid)
        leader.wait(10.0)
        while any(map(_lives, descendants)) and not deadline.over():
            pass
        assert not any(map(_lives, descendants))
        assert other.poll() is None  # another session
        other.kill()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
