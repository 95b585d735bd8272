"""How soon it is known that a call of a child process hangs.

Once a process has hung in a hook of the connector, the cause is established. Another process that stands at
the same line of the same hook has no long wait.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Collection
from pathlib import Path

from pytest_kvconform.rigs.processes.child import ChildProcess
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.linux import descendants_of
from pytest_kvconform.rigs.processes.stacks import Frame, is_hook

LOOK_S = 2.0  # from the begin of a call to the first look at its stack; to each further look twice as long
WRITE_S = 0.2  # for a process to write its stacks; one after the other, since ranks share the log


def hook_of(process: ChildProcess, hooks: Collection[str]) -> Frame | None:
    """The hook in which a process, or one of its ranks, stands now, with the line. None: in no hook."""
    since = process.position()
    for pid in (process.pid, *descendants_of(process.pid)):
        if _writes_stacks(pid):
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, signal.SIGUSR1)
            time.sleep(WRITE_S)
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
        super().__init__(seconds, (*pids, process.pid))
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


def _writes_stacks(pid: int) -> bool:
    """Whether a process catches SIGUSR1, as those of the suite do. It would end another program."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)
