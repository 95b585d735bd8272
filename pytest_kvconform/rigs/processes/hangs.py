"""How soon it is known that a call of a child process hangs.

Once a process has hung in a hook of the connector, the cause is established. Another process that stands at
the same line of the same hook has no long wait. A process that goes on calling hooks does not hang.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Collection, Iterator
from multiprocessing.connection import Connection

from pytest_kvconform.rigs.processes.child import ChildProcess, poll
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.logs import write_stack
from pytest_kvconform.rigs.processes.stacks import Frame, is_hook

LOOK_S = 2.0  # from the begin of a call to the first look at its stack; to each further look twice as long
PATIENCE = 6  # times the deadline of a process in which hooks are still called
LEFT_OUT_S = 300.0  # most seconds of a case that its deadline does not count: a store may save for so long
FEW = 40  # of a process that works for its deadline: a hook takes half a second then

LOOK_AGAIN_S = 0.1  # between two looks whether an engine's start goes on

NAME_BYTES, COUNT_BYTES = 64, 8  # of a running hook, and of a judged process
NOTED, JUDGED = NAME_BYTES + 2 * COUNT_BYTES, 2 * NAME_BYTES + 3 * COUNT_BYTES  # ends of both in the memory
# Hooks of an engine's start, by the beginnings of their names.
STARTS = ("__init__", "register_kv_caches", "set_xfer_handshake_metadata", "init_device")
DEVICE = "init_device"  # of vLLM's worker: no hook, but it starts CUDA, for which processes wait in turn
QUIET, BUSY, UNSTARTED = "quiet", "busy", "unstarted"  # how a process is late


class RunningHook:
    """Which hook of the connector a forked process runs, how many it has begun or ended, how many of its
    seconds do not count, and which process is to be judged if it is late.

    The memory is shared with the process that forked it, and with those that it forks.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, JUDGED)
        self._beside = False
        self._began = 0.0  # when the process that notes hooks began one of a start; 0.0: it runs none

    def note(self, hook: str) -> None:
        """Note which hook runs now; "": none. Notes nothing in a block of `beside`."""
        if self._beside:
            return
        now = time.monotonic()
        started = now - self._began if self._began else 0.0
        self._began = now if hook.startswith(STARTS) else 0.0
        self._memory[:NAME_BYTES] = hook.encode()[:NAME_BYTES].ljust(NAME_BYTES)
        self._write(self.count() + 1, self.uncounted_s() + started)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Note no hook of this process, as long as the block lasts: another process is to come to an end, and
        hooks that are called here meanwhile do not show that it goes on.
        """
        self._beside = True
        try:
            yield
        finally:
            self._beside = False

    @contextlib.contextmanager
    def judging(self, pid: int = 0, what: str = "") -> Iterator[None]:
        """Judge another process than that of the case, which waits for it, as long as the block lasts."""
        before = self._memory[NOTED:JUDGED]
        self.judge(pid, what)
        try:
            yield
        finally:
            self._memory[NOTED:JUDGED] = before

    def judge(self, pid: int = 0, what: str = "") -> None:
        """Judge this process from now on; 0: that of the case. `what`: the process, as the subject of a
        sentence.
        """
        name = what.encode()[:NAME_BYTES].ljust(NAME_BYTES)
        self._memory[NOTED:JUDGED] = pid.to_bytes(COUNT_BYTES, "little") + name

    def judged(self) -> str:
        """The process that is judged, as the subject of a sentence; "": that of the case."""
        return self._memory[NOTED + COUNT_BYTES : JUDGED].rstrip(b"\0 ").decode()

    def write_stack(self, pid: int) -> None:
        """Let the process that is judged write its stack. `pid`: that of the case."""
        judged = int.from_bytes(self._memory[NOTED : NOTED + COUNT_BYTES], "little")
        try:
            write_stack(judged or pid)
        except ProcessLookupError:  # it has just ended
            self.judge()
            write_stack(pid)

    def leave_out(self, seconds: float) -> None:
        """Do not count so many seconds, in which a case has waited. Hooks may have run meanwhile."""
        self._write(self.count(), self.uncounted_s() + seconds)

    def _write(self, count: int, uncounted_s: float) -> None:
        numbers = (number.to_bytes(COUNT_BYTES, "little") for number in (count, int(uncounted_s * 1e6)))
        self._memory[NAME_BYTES:NOTED] = b"".join(numbers)

    def name(self) -> str:
        """The hook that runs now; "": none."""
        return self._memory[:NAME_BYTES].rstrip(b"\0 ").decode()

    def is_start(self) -> bool:
        """Whether the connector is being made."""
        return self.name().startswith("__init__")

    def count(self) -> int:
        """How often one was noted."""
        return int.from_bytes(self._memory[NAME_BYTES : NAME_BYTES + COUNT_BYTES], "little")

    def uncounted_s(self) -> float:
        """Seconds of the process that do not count: those of hooks of an engine's start that have ended, and
        those that `leave_out` was told.
        """
        return int.from_bytes(self._memory[NAME_BYTES + COUNT_BYTES : NOTED], "little") / 1e6

    def wait(
        self, line: Connection, seconds: float, pids: tuple[int, ...], start_s: float = 0.0
    ) -> tuple[str, float]:
        """Wait for a message of the process. Returns how it is late, "" if it is not, and after how long.

        QUIET: fewer than FEW hooks began or ended in so many seconds that count. BUSY: more did, PATIENCE
        times. UNSTARTED: a hook of an engine's start took longer than `start_s`. `pids`: see Deadline.
        """
        for times in range(1, PATIENCE + 1):
            before, uncounted, more = self.count(), self.uncounted_s(), seconds
            while more > 0:
                if poll(line, Deadline(more, pids, look=True)):
                    return "", 0.0
                least = LOOK_AGAIN_S if self.name().startswith(STARTS) else 0.0
                if least and self._hangs_in(start_s - seconds, line, pids):
                    return UNSTARTED, max(start_s, seconds)
                before_s, uncounted = uncounted, self.uncounted_s()
                more = max(least, min(seconds, uncounted - before_s))
            if self.count() < before + FEW:
                return QUIET, times * seconds
        return BUSY, PATIENCE * seconds

    def _hangs_in(self, seconds: float, line: Connection, pids: tuple[int, ...]) -> bool:
        """Whether the hook that runs now still runs after so many more seconds."""
        began, deadline = self.count(), Deadline(seconds, pids)
        while self.count() == began and not deadline.over() and not line.poll(LOOK_AGAIN_S):
            pass
        return self.count() == began and deadline.over()


def hook_of(process: ChildProcess, hooks: Collection[str]) -> Frame | None:
    """The hook in which a process, or one of its ranks, stands now, with the line. None: in no hook."""
    since = process.position()
    process.write_stacks()
    return next((frame for frame in process.stack(hooks, since) if is_hook(frame, hooks)), None)


class CallDeadline(Deadline):
    """The deadline of one call. It is over sooner if the process stands where another one has hung."""

    def __init__(
        self,
        seconds: float,
        process: ChildProcess,
        hooks: Collection[str],
        known: Collection[Frame],
        pids: Collection[int] = (),
    ):
        """`hooks`: names of the connector's hooks. `known`: the hooks in which processes have hung, with the
        line. `pids`: watched besides the process, see Deadline.
        """
        super().__init__(seconds, (*pids, process.watched))
        self._process, self._hooks, self._known = process, hooks, known
        self._look_at, self._hangs = LOOK_S, False

    def over(self) -> bool:
        """Whether the deadline has passed, or the process hangs where another one did."""
        if not self._hangs and self._known and self.passed() >= self._look_at:
            self._look_at *= 2
            self._hangs = hook_of(self._process, self._hooks) in self._known
            if not self._hangs:
                self._process.mark()  # these stacks say nothing about what the call may raise later
        return self._hangs or super().over()
