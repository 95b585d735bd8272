"""Deadlines that do not count time in which the watched processes waited for a core."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from pytest_kvconform.rigs.processes import cores
from pytest_kvconform.rigs.processes.cores import (
    SAMPLE_S,
    Deadline,
    core_waits,
    lost,
    own_core_wait,
    slowness,
)
from pytest_kvconform.rigs.processes.hangs import DEVICE, QUIET, UNSTARTED, RunningHook
from pytest_kvconform.rigs.processes.linux import MOST_LISTS, tasks, threads


class Machine:
    """A clock and the waits of processes, both set by a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.waits = 0.0, dict[int, dict[str, float]]()
        monkeypatch.setattr(cores, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(
            cores,
            "core_waits",
            lambda pids: {pid: dict(waits) for pid, waits in self.waits.items() if pid in pids},
        )

    def seconds_until_over(self, deadline: Deadline, waiting: dict[int, dict[str, float]]) -> float:
        """Let time pass in steps of 0.1 s; `waiting`: the part of it for which threads wait for a core."""
        began = self.now
        while not deadline.over():
            self.now += 0.1
            for pid, parts in waiting.items():
                for thread, part in parts.items():
                    self.waits.setdefault(pid, {}).setdefault(thread, 100.0)
                    self.waits[pid][thread] += 0.1 * part
        return self.now - began


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    ("waiting", "longer"),
    [
        ({}, 1.0),  # a process that hangs, sleeping or computing
        ({1: {"a": 0.5}}, 2.0),
        ({1: {"a": 0.5, "b": 0.5, "c": 0.5}}, 2.0),  # threads side by side lose the same time
        ({1: {"a": 0.4}, 2: {"b": 0.4}}, 5.0),  # one after the other
        ({1: {"a": 0.4}, 2: {"b": 0.4}, 3: {"c": 0.4}}, 5.0),  # a hand-over needs two
        ({1: {"a": 1.0}, 2: {"b": 1.0}}, cores.MOST),
        ({4: {"a": 0.9}}, 1.0),  # somebody else
    ],
)
def test_a_deadline_is_longer_on_a_busy_machine(
    machine: Machine, waiting: dict[int, dict[str, float]], longer: float
) -> None:
    took = machine.seconds_until_over(Deadline(30.0, (1, 2, 3)), waiting)
    assert took == pytest.approx(30.0 * longer, rel=0.02)


def test_a_short_deadline_is_exact_where_nobody_waits(machine: Machine) -> None:
    assert machine.seconds_until_over(Deadline(0.2, (1,)), {}) == pytest.approx(0.2, abs=0.11)
    deadline = Deadline(math.inf, (1,))
    machine.now += 7.0
    assert deadline.passed() == pytest.approx(7.0)


def test_deadlines_share_their_looks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve scenarios side by side, each with a deadline on the process that steps all engines."""
    looks, core_waits = list[int](), cores.core_waits
    monkeypatch.setattr(cores, "core_waits", lambda pids: looks.extend(pids) or core_waits(pids))
    deadlines = []
    for pid in range(2, 14):
        deadlines.append(Deadline(30.0, (1, pid)))
        machine.now += 0.02
    while not any(deadline.over() for deadline in deadlines):
        machine.now += 0.05
    assert looks.count(1) == pytest.approx(looks.count(2), abs=2) == pytest.approx(30 / SAMPLE_S, abs=4)


def busy(number: int) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]


def test_linux_counts_the_waits_of_processes_threads_and_children() -> None:
    """Two busy processes and this one share a core, and wait for it; a sleeping one does not."""
    cores_before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores_before)})  # processes that begin now inherit it
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    hogs = busy(2)
    try:
        end = time.monotonic() + 30.0
        while time.monotonic() < end:
            waits = core_waits([hog.pid for hog in hogs])
            if max((wait for threads in waits.values() for wait in threads.values()), default=0.0) > 0.2:
                break
            time.sleep(0.05)
        else:
            pytest.fail("no busy process waited for a core")
        assert own_core_wait() > 0.0
        assert slowness() > 1.1
        assert len(core_waits([shell.pid])) == 2  # with its child
    finally:
        os.sched_setaffinity(0, cores_before)
        for process in hogs:
            process.kill()
            process.wait()
        for pid in list(core_waits([shell.pid]))[1:]:
            os.kill(pid, 9)
        shell.kill()
        shell.wait()
    assert core_waits([shell.pid]) == {shell.pid: {}}


def test_each_thread_reads_its_own_wait() -> None:
    seen: list[tuple[int, str]] = []

    def look() -> None:
        own_core_wait()
        thread = threading.get_native_id()
        seen.append((thread, os.readlink(f"/proc/self/fd/{cores._files[thread]}")))

    look()
    for _ in range(3):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert len(seen) == 4
    assert all(file.endswith(f"/task/{thread}/schedstat") for thread, file in seen)


def test_a_device_has_the_time_of_a_start() -> None:
    hook, (ours, _theirs) = RunningHook(), Pipe()
    assert hook.wait(ours, 0.2, (os.getpid(),), 0.6) == (QUIET, 0.2)
    hook.note(DEVICE)  # as a worker does while it waits for CUDA
    assert hook.wait(ours, 0.2, (os.getpid(),), 0.6) == (UNSTARTED, 0.6)


def test_what_a_process_leaves_out_does_not_count_and_a_hang_after_it_does() -> None:
    hook, (ours, theirs) = RunningHook(), Pipe()

    def wait_in_parts(seconds: float) -> None:
        while seconds > 0:
            time.sleep(0.05)
            hook.leave_out(0.05)
            seconds -= 0.05

    def work() -> None:
        wait_in_parts(1.5)
        theirs.send("done")

    for body, late in ((work, ""), (lambda: wait_in_parts(0.5), QUIET)):
        waiting = threading.Thread(target=body)
        waiting.start()
        assert hook.wait(ours, 0.4, (os.getpid(),))[0] == late
        assert late or ours.recv() == "done"
        waiting.join()
    assert hook.count() == 0


def test_the_waits_of_a_new_thread_count_and_those_of_a_new_process_do_not() -> None:
    assert lost({1: {"1": 2.0}}, {1: {"1": 2.1, "7": 0.5}, 2: {"2": 9.0}}) == 0.5


def test_a_thread_that_linux_leaves_out_of_one_list_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux did so in 852 of 74,619 lists made beside three threads that end, as in the first list here."""
    own, lists = str(threading.get_native_id()), []
    whole = os.listdir

    def listdir(folder: str) -> list[str]:
        lists.append(folder)
        return [name for name in whole(folder) if len(lists) > 1 or name != own]

    for look in (lambda: tasks(os.getpid()), threads, lambda: core_waits([os.getpid()])[os.getpid()]):
        lists.clear()
        with monkeypatch.context() as patched:
            patched.setattr(os, "listdir", listdir)
            assert own in look() and len(lists) >= 3


def test_threads_that_come_and_go_all_the_time_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = [[f"{number}"] for number in range(100)]
    monkeypatch.setattr(os, "listdir", lambda folder: lists.pop(0))
    assert tasks(os.getpid()) == {str(MOST_LISTS - 2), str(MOST_LISTS - 1)}
