"""The zygote: modules to preload exist, an early end is reported, and sessions end with all processes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.result import Blocked, HarnessError
from pytest_kvconform.rigs import launch
from pytest_kvconform.rigs.launch import (
    CLOSE_S,
    ENGINE_MODULES,
    GEOMETRY_MODULES,
    PRELOAD,
    Zygote,
    launch_zygote,
    wait_for_zygote,
)
from pytest_kvconform.rigs.processes import cores, linux
from pytest_kvconform.rigs.processes.child import ChildProcess
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.zygote import SOCKET
from pytest_kvconform.rigs.vllm_setup import optional_packages


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


@pytest.mark.parametrize("triton", [SimpleNamespace(), None])
def test_importers_get_the_answers_of_a_child(monkeypatch: pytest.MonkeyPatch, triton: Any) -> None:
    import torch

    answers = {
        "get_device_name": ["a GPU", "another"],
        "get_device_capability": [(9, 0), (8, 0)],
        "target": "cuda",
        "properties": [{"warpSize": 32}, {}],
    }
    monkeypatch.setattr(optional_packages, "ask_cuda", lambda: answers)
    monkeypatch.setattr(optional_packages, "_triton_driver", lambda: triton)
    if triton:
        triton.set_active = partial(setattr, triton, "active")
    before, initialized = torch.cuda.get_device_name, torch.cuda.is_initialized()
    with optional_packages.without_cuda():
        assert torch.cuda.get_device_name() == torch.cuda.get_device_name(0) == "a GPU"
        assert torch.cuda.get_device_name(torch.device("cuda", 1)) == "another"
        assert torch.cuda.get_device_capability(torch.cuda.current_device()) == (9, 0)
        if triton:
            assert triton.active.get_current_target() == "cuda"
            assert triton.active.utils.get_device_properties(0) == {"warpSize": 32}
    assert torch.cuda.get_device_name is before and torch.cuda.is_initialized() == initialized
    assert triton is None or triton.active is None


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: 1 / 0, "CUDA does not name its devices: ZeroDivisionError: division by zero"),
        (lambda: os._exit(1), "a process that asked CUDA for its devices ended without an answer"),
    ],
)
def test_cuda_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch, ask: Any, says: str) -> None:
    monkeypatch.setattr(optional_packages, "ask_cuda", ask)
    with pytest.raises(RuntimeError, match=says):
        optional_packages.cuda_asked_in_a_child()


def import_for_ever(arguments: object) -> None:
    """Stands for the preloading of vLLM."""
    time.sleep(600)


def test_a_zygote_that_still_imports_is_not_waited_for() -> None:
    """A usage error is printed after the end of the zygote."""
    zygote = launch_zygote((), preload=f"{__name__}:import_for_ever")
    for _ in range(600):
        if Path(zygote.address).exists():
            break
        time.sleep(0.1)
    began = time.monotonic()
    assert zygote.close() == []
    assert time.monotonic() - began < CLOSE_S / 2
    assert not zygote.run_dir.exists()


def import_what_is_not_there(arguments: object) -> None:
    importlib.import_module("no_such_module")


def test_without_vllm_the_reason_names_the_command_that_helps() -> None:
    zygote = launch_zygote((), preload=f"{__name__}:import_what_is_not_there")
    try:
        with pytest.raises(Blocked, match=r"no_such_module is not installed .*: kvconform doctor says"):
            wait_for_zygote(zygote.address, 60.0)
    finally:
        assert zygote.close() == []


def tell_own_state(connection: Connection, argument: None) -> None:
    """Send what four threads raise whose first work of torch comes at one moment, and a random number."""
    import numpy as np
    import torch

    together, raised = threading.Barrier(4), list[str]()

    def work() -> None:
        together.wait(10)
        try:
            torch.zeros(1 << 16)
        except RuntimeError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connection.send((raised, np.random.randint(1 << 62)))


def test_a_child_has_threads_of_torch_and_random_numbers_of_its_own() -> None:
    """Without one override threads of four of five children fail, without the other all numbers are equal."""
    zygote, numbers = launch_zygote(()), set()
    try:
        wait_for_zygote(zygote.address, 120.0)
        for child in range(20):
            process = ChildProcess(zygote.address, f"child{child}", f"{__name__}:tell_own_state", None, 60.0)
            raised, number = process.receive(60.0)
            process.end()
            assert raised == []
            numbers.add(number)
    finally:
        assert zygote.close() == []
    assert len(numbers) == 20


@pytest.mark.parametrize(("starved", "ready"), [(False, False), (True, True)])
def test_seconds_without_a_core_do_not_count_for_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starved: bool, ready: bool
) -> None:
    (tmp_path / "pid").write_text(str(os.getpid()))
    monkeypatch.setattr(cores, "core_waits", lambda pids: {1: {"1": time.monotonic() if starved else 0.0}})

    def import_slowly() -> None:
        with listener.accept() as connection, contextlib.suppress(BrokenPipeError):
            connection.recv()
            time.sleep(2.0)
            connection.send(("ready", {"vllm": "0"}))

    with Listener(str(tmp_path / SOCKET), "AF_UNIX") as listener:
        thread = threading.Thread(target=import_slowly)
        thread.start()
        try:
            if ready:
                assert wait_for_zygote(str(tmp_path / SOCKET), 0.8) == {"vllm": "0"}
            else:
                with pytest.raises(HarnessError, match="vLLM was not imported within 1 s"):
                    wait_for_zygote(str(tmp_path / SOCKET), 0.8)
        finally:
            thread.join(10)


@pytest.mark.parametrize("starved", [False, True])
def test_seconds_without_a_core_do_not_count_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starved: bool
) -> None:
    monkeypatch.setattr(cores, "core_waits", lambda pids: {1: {"1": time.monotonic() if starved else 0.0}})
    monkeypatch.setattr(launch, "CLOSE_S", 0.8)
    code = "import time; time.sleep(2.5)"  # it does not look at the end of its input
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    name = f"the zygote (process {process.pid}, from which engines are forked)"
    assert Zygote(process, tmp_path).close() == ([] if starved else [f"{name} had to be killed"])
    assert process.poll() == (0 if starved else -9)


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


CLOSES = """
import subprocess, sys
from pathlib import Path
from pytest_kvconform.rigs.processes import zygote

zygote.LEFT_S = 0.2
server = zygote.ForkServer(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
server._let_leave((child.pid,), 1000.0, "")
print(server.close())
"""


def test_a_child_that_shuts_down_for_ever_does_not_keep_the_zygote(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLOSES, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=50).stdout == "[]\n"
