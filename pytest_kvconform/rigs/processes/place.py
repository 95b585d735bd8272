"""Where a zygote runs: how to connect to it, read the logs of its children, and ask for their stacks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_kvconform.rigs.processes.linux import descendants_of

LOOPBACK = "127.0.0.1"
# environment variable of engines on nodes: the folder of their models' config.json, of one name on both
FOLDER_OF_NODES = "KVCONFORM_FOLDER_OF_NODES"
WRITE_S = 0.2  # for a process to write its stacks; one after the other, since ranks share the log


@dataclass(frozen=True)
class Place:
    """The zygote of a run on this machine."""

    address: str  # a Unix socket in the folder of the run
    host: str = LOOPBACK  # the address at which peers reach the engines of this place

    def connect(self) -> Connection:
        """A connection to the zygote. Raises OSError if it is gone."""
        return connect(self.address, 0.0)

    def has(self, path: str) -> bool:
        """Whether engines of this place can read a file or folder of where pytest runs."""
        return True

    def length(self, name: str) -> int:
        """Length of the log of a child, in bytes; 0: it has not written a word."""
        try:
            return self._log_of(name).stat().st_size
        except OSError:
            return 0

    def text(self, name: str, since: int, longest: int) -> bytes:
        """The log of a child from a position on, at most the last `longest` bytes."""
        try:
            return self._log_of(name).read_bytes()[since:][-longest:]
        except OSError:
            return b""

    def write_stacks(self, pid: int) -> None:
        """Let a process, and each that it has started, write its stacks to its log."""
        for one in (pid, *descendants_of(pid)):
            if _writes_stacks(one):
                with contextlib.suppress(OSError):  # it has ended
                    os.kill(one, signal.SIGUSR1)
                time.sleep(WRITE_S)

    def watched(self, pid: int) -> int:
        """The process of this machine that a deadline for the child `pid` looks at: time in which it waits
        for a core does not count.
        """
        return pid

    def unreachable(self, params: Mapping[str, Any] | None) -> str:
        """Why an engine here cannot reach a peer by these kv_transfer_params; "": nothing is known."""
        return ""

    def _log_of(self, name: str) -> Path:
        """The file with the log of a child."""
        return Path(self.address).parent / f"{name}.log"


def connect(address: str, deadline_s: float) -> Connection:
    """A connection to the zygote, which may still be starting. Raises OSError after the deadline."""
    deadline = time.monotonic() + deadline_s
    while True:
        raw = socket.socket(socket.AF_UNIX)
        try:
            raw.connect(address)
            return Connection(raw.detach())
        except OSError:
            raw.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _writes_stacks(pid: int) -> bool:
    """Whether a process catches SIGUSR1, as those of the suite do. It would end another program."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)
