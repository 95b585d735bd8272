"""How long threads waited for a core, and deadlines that do not count this time.

A thread that is ready to run and waits for a core makes no progress, and its program is not to blame. Linux
counts this time for every thread: the second number of /proc/PID/task/TID/schedstat, in nanoseconds (Linux,
Documentation/scheduler/sched-stats.rst). A process that hangs sleeps, or runs: it does not wait for a core,
and its deadline passes as on an idle machine. Where Linux does not count, every second counts.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable

from pytest_kvconform.rigs.processes.linux import tasks

SAMPLE_S = 0.25  # seconds between two looks at a process, at most; before the first every second counts
FRESH_S = 0.03  # deadlines that look at one process within so many seconds share a look
MOST = 10.0  # a deadline becomes at most so many times as long
ON_THE_WAY = 2  # processes that wait one after the other: a hand-over needs P and D
CONTROL_S = 0.03  # of computing, with which `slowness` measures the machine
_files: dict[int, int] = {}  # thread id -> open file descriptor of its schedstat
_looks: dict[int, tuple[float, dict[int, dict[str, float]]]] = {}  # process -> when, core_waits([process])


class Deadline:
    """A deadline in seconds in which the watched processes did not wait for a core.

    On an idle machine these are the seconds of the clock. A process is represented by its thread that waited
    longest, and of all watched processes the ON_THE_WAY that waited longest count.
    """

    def __init__(self, seconds: float, pids: Iterable[int] = (), look: bool = False):
        """`pids`: the watched processes. Empty: this process. `look`: now, for a deadline asked only once."""
        self.seconds = seconds
        self._pids = tuple(pids) or (os.getpid(),)
        self._at = time.monotonic()
        self._counted = 0.0
        self._waits = _shared_waits(self._pids) if look else {}

    def over(self) -> bool:
        """Whether the deadline has passed."""
        return self.left() <= 0

    def passed(self) -> float:
        """Seconds that have passed and count."""
        self.left()
        return self._counted + time.monotonic() - self._at

    def left(self) -> float:
        """Seconds that are left, 0.0 or less after the deadline."""
        now = time.monotonic()
        passed = now - self._at
        # All deadlines look at the same moments, so that they can share a look.
        if now // SAMPLE_S == self._at // SAMPLE_S and self._counted + passed < self.seconds:
            return self.seconds - self._counted - passed
        waits = _shared_waits(self._pids)
        self._counted += passed - min(lost(self._waits, waits), passed * (1 - 1 / MOST))
        self._waits, self._at = waits, now
        return self.seconds - self._counted


def lost(before: dict[int, dict[str, float]], now: dict[int, dict[str, float]]) -> float:
    """Seconds that were lost by waiting for a core between two looks."""
    longest = [
        max((wait - before[pid].get(task, 0.0) for task, wait in waits.items()), default=0.0)
        for pid, waits in now.items()
        if pid in before
    ]
    return sum(sorted(longest)[-ON_THE_WAY:])


def _shared_waits(pids: Iterable[int]) -> dict[int, dict[str, float]]:
    """What `core_waits` returns, at most FRESH_S old: a look at many threads takes milliseconds."""
    found: dict[int, dict[str, float]] = {}
    for pid in pids:
        now = time.monotonic()
        if pid not in _looks or now - _looks[pid][0] >= FRESH_S:
            _looks[pid] = now, core_waits([pid])
        found |= _looks[pid][1]
    return found


def core_waits(pids: Iterable[int]) -> dict[int, dict[str, float]]:
    """Seconds that each thread of these processes has waited for a core, and of their children, such as the
    ranks of an engine; not of the children of this process.

    Returns process -> thread -> seconds, without what has ended.
    """
    found: dict[int, dict[str, float]] = {}
    own = os.getpid()
    todo = list(dict.fromkeys(pids))
    while todo:
        pid, waits = todo.pop(), dict[str, float]()
        try:
            for task in tasks(pid):
                with contextlib.suppress(
                    OSError, IndexError
                ):  # the thread has ended, or Linux does not count
                    waits[task] = _waited(_read(f"/proc/{pid}/task/{task}/schedstat"))
            if pid != own:
                todo += map(int, _read(f"/proc/{pid}/task/{pid}/children").split())
        except OSError:
            pass  # the process has ended, or Linux lists no children
        found[pid] = waits
    return found


def own_core_wait() -> float:
    """Seconds that the calling thread has waited for a core in its life. Takes 2 microseconds."""
    thread = threading.get_native_id()
    for _ in range(2):
        try:
            if thread not in _files:
                _files[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            return _waited(os.pread(_files[thread], 64, 0))
        except (
            OSError,
            IndexError,
        ):  # Linux does not count, or another thread that has ended had the same id
            if (stale := _files.pop(thread, None)) is not None:
                os.close(stale)
    return 0.0


def slowness() -> float:
    """How many times as long as on an idle machine a computation takes now. 1.0: the machine is idle."""
    began, waited, used = time.monotonic(), own_core_wait(), time.thread_time()
    while time.thread_time() - used < CONTROL_S:
        pass
    took = time.monotonic() - began
    return took / max(took - (own_core_wait() - waited), took / MOST)


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(4096)


def _waited(schedstat: bytes) -> float:
    return int(schedstat.split()[1]) * 1e-9
