"""Whose doing it is that a process which a case has forked has ended."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from pytest_kvconform.result import ProcessKilled
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.zygote import GONE_S, has_ended
from pytest_kvconform.rigs.scheduler.violations import DIES

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Rig


def end(rig: Rig, pid: int, what: str, sentence: str) -> Exception:
    """The exception for a child of this process that has ended, with this sentence.

    ProcessKilled if something outside the run has killed it, as Linux does for want of memory, else
    Violation. `what`: the process, as the subject of a sentence.
    """
    if has_ended(pid, Deadline(GONE_S, (pid,))):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_code == os.CLD_KILLED and ended.si_status == signal.SIGKILL:
            return ProcessKilled(what, pid)
    return rig.violation(DIES, sentence)
