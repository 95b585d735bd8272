"""GPUs are leased by file locks: one process at a time has one, and loses it when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.processes import gpus
from pytest_kvconform.rigs.processes.gpus import Gpu, gpus_here, lease, shown

HOLD = """
import sys, time
from pytest_kvconform.rigs.processes.gpus import Gpu, lease
held = lease(int(sys.argv[1]), [Gpu(str(n), word) for n, word in enumerate(sys.argv[2:])], "a cell", 20.0)
print(*[gpu.word for gpu in held.gpus], flush=True)
time.sleep(60)
"""
SHORT = 0.2  # seconds


@pytest.fixture
def four() -> list[Gpu]:
    """GPUs that no other test has."""
    return [Gpu(str(number), f"GPU-{uuid.uuid4()}") for number in range(4)]


@pytest.fixture
def holder(four: list[Gpu]) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the first two."""
    command = [sys.executable, "-c", HOLD, "2", *(gpu.uuid for gpu in four)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["0", "1"]
        yield process
        process.kill()


def test_two_processes_never_have_one_gpu(four: list[Gpu], holder: subprocess.Popen[str]) -> None:
    held = lease(2, four, "the cell", SHORT)
    assert [gpu.word for gpu in held.gpus] == ["2", "3"]
    with pytest.raises(Blocked, match=r"needs 1 of the 4 GPUs .* other runs held them for 0 s"):
        lease(1, four, "the cell", SHORT)
    held.give_back()
    lease(2, four, "the cell", SHORT).give_back()


def test_a_killed_process_frees_its_gpus(four: list[Gpu], holder: subprocess.Popen[str]) -> None:
    with pytest.raises(Blocked):
        lease(3, four, "the cell", SHORT)
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    held = lease(4, four, "the cell", SHORT)
    assert held.gpus == tuple(four)
    held.give_back()


def test_a_lease_that_is_not_to_be_had_holds_nothing(four: list[Gpu], holder: subprocess.Popen[str]) -> None:
    with pytest.raises(Blocked):
        lease(4, four, "the cell", SHORT)
    lease(2, four, "the cell", SHORT).give_back()


def test_who_needs_many_is_not_overtaken(four: list[Gpu]) -> None:
    first, order = lease(2, four, "a", SHORT), list[str]()

    def take(count: int, name: str) -> None:
        held = lease(count, four, name, 20.0)
        order.append(name)
        time.sleep(SHORT)
        held.give_back()

    many = threading.Thread(target=take, args=(4, "many"))
    many.start()
    while many.is_alive() and (queue := gpus._try(gpus._folder_of_locks(), "queue")):
        queue.release()  # "many" does not yet wait at its head
        time.sleep(SHORT / 10)
    few = threading.Thread(target=take, args=(1, "few"))
    few.start()
    time.sleep(SHORT)
    assert order == []  # two GPUs are free
    first.give_back()
    for one in (many, few):
        one.join(20.0)
    assert order == ["many", "few"]


@pytest.mark.parametrize(("here", "has"), [(0, "has none"), (2, "has 2")])
def test_fewer_gpus_than_are_needed_are_one_sentence(four: list[Gpu], here: int, has: str) -> None:
    with pytest.raises(Blocked) as raised:
        lease(3, four[:here], "the cell gemma3-P1D2", SHORT)
    sentence = f"the cell gemma3-P1D2 needs 3 GPUs, one for each rank, and this machine {has}"
    assert str(raised.value) == sentence


def test_gpus_are_those_that_cuda_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '0, GPU-aa\\n1, GPU-bb\\n2, GPU-cc\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpu.word for gpu in gpus_here()] == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-a,0")
    # named in two ways, a GPU has one lock
    assert gpus_here() == (Gpu("2", "GPU-cc"), Gpu("GPU-a", "GPU-aa"))
    assert shown(gpus_here())["CUDA_VISIBLE_DEVICES"] == "2,GPU-a"
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert gpus_here() == ()


def test_a_machine_without_a_driver_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_here() == ()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'no devices were found'\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert gpus_here() == ()
