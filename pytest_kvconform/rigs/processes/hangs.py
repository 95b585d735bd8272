"""How soon it is known that a call of a child process hangs.

Once a process has hung in a hook of the connector, the cause is established. Another process that stands at
the same line of the same hook has no long wait. A process that goes on calling hooks does not hang.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection
from multiprocessing.connection import Connection

from pytest_kvconform.rigs.processes.child import ChildProcess, poll
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.stacks import Frame, is_hook

LOOK_S = 2.0  # from the begin of a call to the first look at its stack; to each further look twice as long
PATIENCE = 6  # times the deadline of a process in which hooks are still called
FEW = 40  # of a process that works for its deadline: a hook takes half a second then

NAME_BYTES, COUNT_BYTES = 64, 8  # of a running hook
QUIET, BUSY = "quiet", "busy"  # how a process is late


class RunningHook:
    """Which hook of the connector a forked process runs, and how many it has begun or ended.

    The memory is shared with the process that forked it.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, NAME_BYTES + COUNT_BYTES)

    def note(self, hook: str) -> None:
        """Note which hook runs now; "": none."""
        self._memory[:NAME_BYTES] = hook.encode()[:NAME_BYTES].ljust(NAME_BYTES)
        self._memory[NAME_BYTES:] = (self.count() + 1).to_bytes(COUNT_BYTES, "little")

    def name(self) -> str:
        """The hook that runs now; "": none."""
        return self._memory[:NAME_BYTES].rstrip(b"\0 ").decode()

    def is_start(self) -> bool:
        """Whether the connector is being made."""
        return self.name().startswith("__init__")

    def count(self) -> int:
        """How often one was noted."""
        return int.from_bytes(self._memory[NAME_BYTES:], "little")

    def wait(self, line: Connection, seconds: float, pids: tuple[int, ...]) -> tuple[str, float]:
        """Wait for a message of the process. Returns how it is late, "" if it is not, and after how long.

        QUIET: fewer than FEW hooks began or ended in so many seconds. BUSY: more did, PATIENCE times. `pids`:
        see Deadline.
        """
        for times in range(1, PATIENCE + 1):
            before = self.count()
            if poll(line, Deadline(seconds, pids)):
                return "", 0.0
            if self.count() < before + FEW:
                return QUIET, times * seconds
        return BUSY, PATIENCE * seconds


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
