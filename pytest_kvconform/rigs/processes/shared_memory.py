"""Files in /dev/shm that the processes of a run made: noted while they run, removed when they have ended.

Temporary files need no such care: TMPDIR of every process is the folder of the run, which the zygote removes.
A file in another place that a connector names itself stays.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from pytest_kvconform.rigs.processes.linux import (
    SHARED_MEMORY,
    open_shared_memory,
    shared_memory_of,
)

MADE = "made-in-dev-shm"  # file in the folder of the run: names, each with a zero byte behind it


class SharedMemory:
    """What the children of the zygote have made in /dev/shm."""

    def __init__(self, run_dir: Path):
        self.started = time.time()
        self._noted: set[str] = set()
        self._made = run_dir / MADE
        _note_made_files(self._made)

    def note(self, sessions: list[int]) -> None:
        """Note the files that these sessions have mapped or open, before they end."""
        self._noted |= {file for session in sessions for file in shared_memory_of(session)}

    def note_processes(self, pids: list[int]) -> None:
        """Note the files that these processes have mapped or open."""
        self._noted |= open_shared_memory(pids)

    def remove(self, at_the_end: bool = False) -> None:
        """Remove files that ended processes left, unless another process uses them.

        A store may open again what it has made and closed: such files are removed at the end of the run.
        """
        if at_the_end:
            with contextlib.suppress(OSError):
                self._noted |= set(filter(None, self._made.read_text("utf-8", "surrogateescape").split("\0")))
        self._noted = {file for file in self._noted if self._is_ours(file)}
        if self._noted:
            for file in self._noted - open_shared_memory():
                with contextlib.suppress(OSError):
                    os.unlink(file)
                    self._noted.discard(file)

    def _is_ours(self, file: str) -> bool:
        """Whether a file exists and is no older than this run."""
        try:
            return os.stat(file).st_ctime >= self.started
        except OSError:
            return False


def _note_made_files(names: Path) -> None:
    """Let this process and its forks note the files in /dev/shm that Python code makes.

    Shared memory that a library makes without Python is mapped, and so seen by `note`.
    """
    sink = os.open(names, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or type(path := arguments[0]) is not str or not path.startswith(SHARED_MEMORY):
            return
        if arguments[2] & os.O_CREAT and not os.path.lexists(path):
            os.write(sink, os.fsencode(path) + b"\0")

    sys.addaudithook(hook)
