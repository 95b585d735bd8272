"""The zygote of one node of a Ray cluster, and its connections: the class of an actor on that node."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from pytest_kvconform.result import Blocked, HarnessError
from pytest_kvconform.rigs.launch import start_zygote, wait_for_zygote
from pytest_kvconform.rigs.processes.place import FOLDER_OF_NODES, Place

if TYPE_CHECKING:
    from pytest_kvconform.settings import Settings

LOOK_S = 0.5  # between two looks at whether a connection was closed here
THREADS = 64  # calls that the actor answers at once: each connection has one that waits for a message


class NodeHost:
    """A zygote that ends with the actor, and so with the run whose driver made it, however that ends.

    Messages are bytes, as `multiprocessing` pickles them: the actor does not look at them.
    """

    def __init__(self, settings: Settings, folder: str, models: str):
        """`folder`: the working folder of pytest. `models`: the folder of the models, one path on both nodes,
        whatever their TMPDIR is.
        """
        with contextlib.suppress(OSError):  # the node need not have it
            os.chdir(folder)
        os.environ.setdefault("UCX_NET_DEVICES", "all")  # loopback reaches no other node
        self._models = Path(models)
        self._models.mkdir(parents=True, exist_ok=True)
        (self._models / "pid").write_text(str(os.getpid()))  # a later run removes it if nobody else does
        os.environ[FOLDER_OF_NODES] = str(self._models)
        self._module = settings.connector.partition(":")[0] if ":" in settings.connector else ""
        self._zygote = start_zygote(settings)
        self._place = Place(self._zygote.address)
        self._lines: dict[int, Connection] = {}
        self._numbers = itertools.count()

    def ready(self, deadline_s: float) -> tuple[str, str, str, dict[str, str]]:
        """Wait until the zygote has imported vLLM.

        Returns the address of the node; the outcome of every case and why, or "" twice; the zygote's facts
        about vLLM.
        """
        host = ray.util.get_node_ip_address()
        top = self._module.partition(".")[0]
        if top and PathFinder.find_spec(top, [*sys.path, os.getcwd()]) is None:
            return host, "BLOCKED", f"there is no module {top!r}", {}
        try:
            return host, "", "", wait_for_zygote(self._zygote.address, deadline_s)
        except (Blocked, HarnessError) as error:
            return host, "BLOCKED" if isinstance(error, Blocked) else "HARNESS", str(error), {}

    def open(self) -> int:
        """Open a connection to the zygote. Returns its number. Raises OSError if the zygote is gone."""
        number = next(self._numbers)
        self._lines[number] = self._place.connect()
        return number

    def send(self, number: int, message: bytes) -> None:
        """Send a message. Raises OSError or KeyError if the connection has ended."""
        self._lines[number].send_bytes(message)

    def receive(self, number: int) -> bytes | None:
        """Wait for a message; None: the connection has ended."""
        try:
            while not self._lines[number].poll(LOOK_S):
                pass
            return self._lines[number].recv_bytes()
        except (OSError, EOFError, KeyError):
            return None

    def close(self, number: int) -> None:
        """Close a connection."""
        if line := self._lines.pop(number, None):
            line.close()

    def has(self, path: str) -> bool:
        """See `Place.has`."""
        return Path(path).exists()

    def length(self, name: str) -> int:
        """See `Place.length`."""
        return self._place.length(name)

    def text(self, name: str, since: int, longest: int) -> bytes:
        """See `Place.text`."""
        return self._place.text(name, since, longest)

    def write_stacks(self, pid: int) -> None:
        """See `Place.write_stacks`."""
        self._place.write_stacks(pid)

    def end(self) -> list[str]:
        """End the zygote and all that it forked. Returns sentences about what did not end."""
        troubles = self._zygote.close()
        shutil.rmtree(self._models, ignore_errors=True)
        return troubles
