"""A child process of the zygote, as its caller sees it: a connection, a log, and an end with a deadline."""

from __future__ import annotations

import os
from collections.abc import Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_kvconform.result import HarnessError
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.logs import exceptions_in, last_lines, reason_of_start
from pytest_kvconform.rigs.processes.place import Place
from pytest_kvconform.rigs.processes.stacks import (
    Frame,
    last_stacks,
    most_telling_stack,
    place_of_del,
    stacks_of_ends,
)

END_S = 60.0  # for the zygote to kill and reap a process
POLL_S = 1.0  # between two looks at whether the process could run
GONE = (
    "the zygote (the process that engines are forked from) is gone; "
    "did somebody kill it, or the machine for want of memory?"
)


class ForkRefused(Exception):
    """The zygote did not fork a child. The message is the zygote's own sentence."""


class ChildProcess:
    """A child of the zygote that runs `target` ("module:function") with a connection and one argument.

    `place`: of the zygote, or its address on this machine. Raises ForkRefused if the zygote forks nothing,
    HarnessError if the zygote is gone.
    """

    def __init__(self, place: str | Place, name: str, target: str, argument: Any, deadline_s: float):
        self.place, self.name = Place(place) if isinstance(place, str) else place, name
        self.asked_at = 0  # length of the log at the last call: stacks before it say nothing about that call
        try:
            self.connection = self.place.connect()  # the zygote is known to be up
        except OSError:
            raise HarnessError(GONE) from None
        try:
            self.connection.send(("fork", name, target, argument))
            answer = self.receive(deadline_s)
        except (OSError, EOFError):
            self.connection.close()
            raise HarnessError(GONE) from None
        if answer[0] != "pid":
            self.connection.close()
            raise ForkRefused(answer[-1])
        self.pid: int = answer[1]

    @property
    def address(self) -> str:
        """The address of the zygote where pytest runs, also for an engine on another node."""
        return self.place.address

    @property
    def watched(self) -> int:
        """The process of this machine that a deadline for the child looks at, see `Place.watched`."""
        return self.place.watched(getattr(self, "pid", os.getpid()))

    def receive(self, deadline: float | Deadline) -> Any:
        """The next message. Raises EOFError: the process is gone; TimeoutError: it sent nothing in time.

        `deadline`: or its seconds. Time in which the process waited for a core does not count among these.
        """
        if not isinstance(deadline, Deadline):
            deadline = Deadline(deadline, (self.watched,))
        if not poll(self.connection, deadline):
            raise TimeoutError
        return self.connection.recv()

    def end(self, gone: bool = False) -> int | None:
        """Kill the process and everything it started. Returns its wait status, None without a zygote.

        `gone`: its connection has ended. Returns zygote.LIVED if the process was still alive.
        Can be called again.
        """
        try:
            with self.place.connect() as connection:
                connection.send(("end", self.pid, gone))
                return connection.recv()[1] if connection.poll(END_S) else None
        except (OSError, EOFError):
            return None  # the zygote is gone, and its children ended with it
        finally:
            # Last: without a connection the process would end by itself, and the zygote would not see what
            # the process leaves.
            self.connection.close()

    def close(self) -> None:
        """Forget the process, whose end the zygote looks after (`leave`)."""
        self.connection.close()

    def mark(self) -> None:
        """Let `stack` look at what the process logs from now on."""
        self.asked_at = self.position()

    def position(self) -> int:
        """Length of the log now, in bytes."""
        return self.place.length(self.name)

    def write_stacks(self) -> None:
        """Let the process, and each that it has started, write its stacks to the log."""
        self.place.write_stacks(self.pid)

    def exceptions(self, since: int) -> tuple[str, ...]:
        """Exceptions that the process logged after a position, see `logs.exceptions_in`."""
        return exceptions_in(self._text(since, 200_000))

    def reason_of_start(self) -> str:
        """The exception for which a vLLM server did not start, see `logs.reason_of_start`."""
        return reason_of_start(self._text(0, 200_000))

    def last_lines(self) -> tuple[str, ...]:
        """The last lines of the log. Bytes that are no text are shown as escapes."""
        return last_lines(self._text(0, 20_000))

    def stack(self, functions: Collection[str], since: int = -1) -> tuple[Frame, ...]:
        """The stack that tells most, see `stacks.most_telling_stack`, since the last `mark`, or since the log
        was `since` bytes long.
        """
        return most_telling_stack(self._text(self.asked_at if since < 0 else since, 60_000), functions)

    def last_stacks(self) -> tuple[Frame, ...]:
        """Frames of the threads that ended or hung the process since the last `mark`."""
        return last_stacks(self._text(self.asked_at, 60_000))

    def stacks_of_ends(self) -> tuple[tuple[Frame, ...], ...]:
        """The stack of each of these threads: that of the process, and those of its ranks."""
        return stacks_of_ends(self._text(self.asked_at, 60_000))

    def place_of_del(self) -> str:
        """Where the process hangs, if it collects garbage or is in an object's `__del__`:
        " in garbage collection (context.py:264)"; "": in neither.
        """
        text = self._text(self.asked_at, 60_000)
        place, frames = place_of_del(text), last_stacks(text)
        return f" {place} ({Path(frames[0][0]).name}:{frames[0][1]})" if place and frames else ""

    def _text(self, since: int, longest: int) -> str:
        """The log from a position on, at most the last `longest` bytes."""
        return self.place.text(self.name, since, longest).decode("utf-8", "backslashreplace")


def leave(processes: Collection[ChildProcess], seconds: float, folder: str = "") -> None:
    """Give processes that have been told to shut down this time to end, without waiting for them.

    Their zygotes kill those that have not ended by then, and remove what they leave. `folder`: removed then,
    by the last zygote.
    """
    places = list(dict.fromkeys(process.place for process in processes))
    for place in places:
        here = [process for process in processes if process.place == place]
        removed = folder if place == places[-1] else ""
        try:
            with place.connect() as connection:
                connection.send(("leave", tuple(process.pid for process in here), seconds, removed))
                connection.poll(END_S)
        except OSError:
            pass  # the zygote is gone, and its children ended with it
        for process in here:
            process.close()


def poll(connection: Connection, deadline: Deadline) -> bool:
    """Wait until a message, or the end of the connection, can be read. Returns whether it came in time."""
    while not connection.poll(min(POLL_S, max(0.0, deadline.left()))):
        if deadline.over():
            return False
    return True
