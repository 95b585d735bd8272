"""The guard: one process that starts the services of a run, watches them, and ends them.

    python -m pytest_kvconform.rigs.processes.guard FOLDER

Its standard input brings one line of JSON, a list of `Order` as objects, and is the life line then: when it
ends, however pytest ended, the guard ends every service with all that it started, and removes FOLDER. A
service starts when the one before it is ready. The guard answers in files of FOLDER:

    ready    the ids of the processes of all services, as JSON: all are ready
    problem  one sentence: a service did not come up, or has ended in the middle of the run
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.linux import (
    become_subreaper,
    children_of,
    descendants_of,
    die_with_parent,
    listening_sockets,
)
from pytest_kvconform.rigs.processes.logs import printable
from pytest_kvconform.rigs.processes.shared_memory import SharedMemory

READY_FILE, PROBLEM_FILE, PID_FILE = "ready", "problem", "pid"
LINE = "line:"  # of a readiness check: a text of the output
LOOK_S = 0.05  # between two looks at the services
NOTE_S = 1.0  # between two looks at what they have in /dev/shm
LEAVE_S = 5.0  # for services to end after SIGTERM
KILL_S = 5.0  # for what is left to end after SIGKILL
PROBE_S = 1.0  # for an answer to one readiness check
LAST_LINES = 4  # of a log, in a sentence


class Order(NamedTuple):
    """What the guard is told of one service."""

    name: str
    command: list[str]
    ready: str  # "tcp://HOST:PORT", "http://HOST:PORT/PATH" or "line:TEXT"
    address: list[str | int] | None  # host and port of the readiness check; None: it is a line
    deadline: float  # seconds
    environment: dict[str, str]  # beside that of the guard
    files: dict[str, str]  # name -> text, in the folder
    folder: str  # of the service, for its files
    log: str  # path


class Trouble(Exception):
    """A service is not there. The message is one sentence."""


class LifeLineEnded(Exception):
    """The process that started the guard is gone, or has told it to end."""


class Guard:
    """The services of one run."""

    def __init__(self, folder: Path):
        self.folder, self.shared_memory = folder, SharedMemory(folder)
        self.running: list[tuple[Order, subprocess.Popen[bytes]]] = []
        self.noted = 0.0

    def watch(self, orders: list[Order]) -> None:
        """Start services, then watch them. Returns when the life line ends, and not before."""
        with contextlib.suppress(LifeLineEnded):
            try:
                for order in orders:
                    self._start(order)
                self._write(READY_FILE, json.dumps([process.pid for _, process in self.running]))
                while True:
                    self._look()
            except Trouble as trouble:
                sentence = str(trouble)
            except (OSError, ValueError) as error:
                sentence = f"the services cannot be watched: {type(error).__name__}: {error}"
            self._write(PROBLEM_FILE, sentence)
            while True:
                self._wait()

    def _start(self, order: Order) -> None:
        if order.address and _answers(order.address):
            host, port = order.address
            raise _down(order, f"another process listens on {host}:{port} already")
        Path(order.folder).mkdir(exist_ok=True)
        for name, text in order.files.items():
            (Path(order.folder) / name).write_text(text, encoding="utf-8")
        with open(order.log, "wb") as log:
            try:
                process = subprocess.Popen(
                    order.command,
                    env={**os.environ, "TMPDIR": order.folder, **order.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=die_with_parent,  # in case that the guard itself is killed
                )
            except OSError as error:
                raise _down(order, _not_run(order, error)) from None
        self.running.append((order, process))
        deadline = Deadline(order.deadline, (process.pid,))
        while not _is_ready(order):
            self._look(starting=order)
            if deadline.over():
                raise _down(order, f"{_awaited(order)} within {order.deadline:g} s{self._elsewhere(order)}")
        self._look(starting=order)

    def _look(self, starting: Order | None = None) -> None:
        """Wait a moment. Raises Trouble if a service has ended."""
        self._wait()
        for order, process in self.running:
            if (status := process.poll()) is not None:
                how = f"killed by {_signal(-status)}" if status < 0 else f"exit code {status}"
                if order is starting:
                    raise _down(order, f"its process ended with {how}" if status >= 0 else f"it was {how}")
                raise Trouble(_sentence(order, f"ended in the middle of the run ({how})"))

    def _wait(self) -> None:
        """Wait a moment. Raises LifeLineEnded."""
        if select.select([sys.stdin.fileno()], [], [], LOOK_S)[0] and not os.read(sys.stdin.fileno(), 1):
            raise LifeLineEnded
        if time.monotonic() - self.noted > NOTE_S:
            self.shared_memory.note_processes(descendants_of(os.getpid()))
            for pid in {*children_of(os.getpid())} - {process.pid for _, process in self.running}:
                with contextlib.suppress(ChildProcessError):  # of a service that has ended: reap it
                    os.waitpid(pid, os.WNOHANG)
            self.noted = time.monotonic()

    def _elsewhere(self, order: Order) -> str:
        """Where a service listens that should listen elsewhere."""
        if order.address is None:
            return ""
        process = next(process for one, process in self.running if one is order)
        found: set[str] = set()
        for pid in (process.pid, *descendants_of(process.pid)):
            with contextlib.suppress(OSError):  # it has ended
                found |= {*listening_sockets(pid)}
        return f"; it listens on {', '.join(sorted(found))}" if found else "; it listens on no port"

    def _write(self, name: str, text: str) -> None:
        new = self.folder / f".{name}"
        new.write_text(text, encoding="utf-8")
        new.rename(self.folder / name)

    def end(self) -> None:
        """End every service and all that they started. What they left in /dev/shm is removed."""
        own = os.getpid()
        self.shared_memory.note_processes(descendants_of(own))
        for _, process in reversed(self.running):
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + LEAVE_S
        while descendants_of(own) and time.monotonic() < deadline:
            if all(process.poll() is not None for _, process in self.running):
                break  # what is left was not told to end
            time.sleep(0.01)
        deadline = time.monotonic() + KILL_S
        while children_of(own) and time.monotonic() < deadline:
            for pid in descendants_of(own):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.01)
        self.shared_memory.remove(at_the_end=True)


def _answers(address: list[str | int]) -> bool:
    """Whether somebody listens there."""
    host, port = address
    try:
        with socket.create_connection((str(host), int(port)), PROBE_S):
            return True
    except (OSError, ValueError):  # nobody, or no name of a host
        return False


def _is_ready(order: Order) -> bool:
    if order.ready.startswith(LINE):
        return order.ready[len(LINE) :] in _log(order)
    if order.ready.startswith("http"):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(order.ready, timeout=PROBE_S):
                return True
        except (OSError, ValueError, HTTPException):  # an answer that is an error, or none
            return False
    return order.address is not None and _answers(order.address)


def _awaited(order: Order) -> str:
    """What did not come, as the beginning of a sentence."""
    if order.ready.startswith(LINE):
        return f"it did not write {order.ready[len(LINE) :]!r}"
    if order.ready.startswith("http"):
        return f"{order.ready} did not answer"
    assert order.address is not None
    return f"nobody listened on {order.address[0]}:{order.address[1]}"


def _not_run(order: Order, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no command {order.command[0]!r}"
    return f"{order.command[0]!r} cannot be run: {error.strerror}"


def _down(order: Order, why: str) -> Trouble:
    return Trouble(_sentence(order, f"did not come up: {why}"))


def _sentence(order: Order, what: str) -> str:
    """One sentence about a service, with its command and the last lines of its log."""
    lines = [printable(line)[:160] for line in _log(order).splitlines() if line.strip()][-LAST_LINES:]
    said = f"its log ends with: {' | '.join(lines)}" if lines else "its log is empty"
    return f"the service {order.name} {what}; its command is: {' '.join(order.command)}; {said} ({order.log})"


def _log(order: Order) -> str:
    try:
        return Path(order.log).read_bytes()[-200_000:].decode("utf-8", "backslashreplace")
    except OSError:
        return ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def main(folder: Path) -> int:
    """Wait for orders, and follow them until the life line ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    become_subreaper()
    guard = Guard(folder)
    try:
        # not sys.stdin: its buffer would hide from `select` what follows the line
        line = b""
        while not line.endswith(b"\n") and (more := os.read(sys.stdin.fileno(), 65536)):
            line += more
        if line.endswith(b"\n"):
            guard.watch([Order(**order) for order in json.loads(line)])
    finally:
        guard.end()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
