"""The zygote (fork server): one process that imports what its children need, and forks them on demand.

    python -m pytest_kvconform.rigs.processes.zygote RUN_DIR PRELOAD ARGUMENTS

PRELOAD ("module:function") imports what children need; it gets ARGUMENTS, a JSON object, and returns facts.
An engine that is forked then is up in one second instead of thirty.

The zygote listens on the Unix socket RUN_DIR/zygote.sock. A connection carries one request, a
pickled tuple:

    ("ping",)                    -> ("ready", facts) or ("failed", kind, sentence), once PRELOAD has returned
    ("fork", name, target, arg)  -> the connection passes to a new child, which calls target(connection, arg);
                                    ("pid", pid) comes first
    ("end", pid, gone)           -> kills the child's whole session, reaps it; ("ended", how it ended)
    ("leave", pids, s, folder)   -> ("leaving",); kills these children after s seconds, if they have not ended
                                    by then, and removes the folder
    ("environment",)             -> ("environment", the variables of the zygote)
    ("close",)                   -> ends every child; ("closed", [sentences about processes that did not end])

The zygote owns RUN_DIR: logs, sockets, temporary files of every child. It ends, kills what it forked and
removes RUN_DIR when a client tells it to close. It does the same when the process that started it is gone,
however that process ended: the zygote's standard input is the life line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import resource
import select
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pytest_kvconform.rigs.processes import linux
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.linux import (
    become_subreaper,
    children_of,
    die_with_parent,
    kill_session,
    write_stack_at_death,
)
from pytest_kvconform.rigs.processes.shared_memory import SharedMemory

SOCKET = "zygote.sock"
READY = "ready"  # file that exists as soon as the zygote answers
LEFT_S = 12.0  # for children that shut down when the zygote ends; launch.py waits longer
LOOK_S = 0.05  # between two looks at children that shut down
GONE_S = 2.0  # for a child to end after the end of its connection
LIVED = -1  # instead of a wait status: the child had not ended by then
REQUEST_S = 20.0  # for a connected client to send its request


class Leaving(NamedTuple):
    """Children that have been told to shut down."""

    pids: tuple[int, ...]
    deadline: Deadline
    folder: str  # to be removed then; "": none


class ForkServer:
    """The serving loop, in one thread. It waits for killed children to be reaped, and for nothing else."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(run_dir / SOCKET))
        self.listener.listen(64)
        self.ready: tuple[Any, ...] = ("failed", "harness", "the preloading has not ended")
        self.shared_memory = SharedMemory(run_dir)
        self.leaving: list[Leaving] = []
        self.ended: dict[int, int] = {}  # pid -> wait status, of children already reaped

    def serve(self) -> None:
        """Answer requests until a client sends ("close",) or standard input ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(LOOK_S if self.leaving else None):
                    if key.fileobj is not self.listener:
                        if not os.read(sys.stdin.fileno(), 1):
                            return
                    elif not self._answer(Connection(self.listener.accept()[0].detach())):
                        return
                self._look_after_leaving()

    def _answer(self, connection: Connection) -> bool:
        """Answer one request. Returns False after a request to close."""
        with connection:
            try:
                if not connection.poll(REQUEST_S):
                    return True
                what, *args = connection.recv()
                if what == "fork" and self.ready[0] == "ready":
                    self._fork(connection, *args)
                elif what == "end":
                    connection.send(("ended", self._end(*args)))
                elif what == "leave":
                    self._let_leave(*args)
                    connection.send(("leaving",))
                elif what == "environment":
                    connection.send(("environment", dict(os.environ)))
                elif what == "close":
                    connection.send(("closed", self.close()))
                    return False
                else:
                    connection.send(self.ready)
            except (OSError, EOFError):
                return True  # the client is gone
        return True

    def _fork(self, connection: Connection, name: str, target: str, argument: Any) -> None:
        if os.fork() == 0:
            self.listener.close()
            become(name, self.run_dir)
            connection.send(("pid", os.getpid()))
            run(target, connection, argument)

    def _end(self, pid: int, gone: bool = False, last: bool = True) -> int | None:
        """Kill the session of one child. Returns its wait status, or None for a process that is no child.

        `gone`: the child should have ended by itself. Returns LIVED if it has not. `last`: no other child is
        ended right after it.
        """
        if pid not in self.ended:
            self.shared_memory.note([pid])
            if gone and not has_ended(pid, Deadline(GONE_S, (pid,))):
                self.ended[pid] = LIVED
            kill_session(pid)
            try:
                status = os.waitpid(pid, 0)[1]
            except ChildProcessError:
                return None
            self.ended.setdefault(pid, status)
        kill_session(pid)  # what the child itself forked, and what it left to its own children
        self._reap()
        if last:
            self.shared_memory.remove()
        return self.ended[pid]

    def _let_leave(self, pids: tuple[int, ...], seconds: float, folder: str) -> None:
        """Give children that have been told to shut down time to end."""
        self.shared_memory.note(list(pids))
        self.leaving.append(Leaving(pids, Deadline(seconds, pids), folder))

    def _look_after_leaving(self, at_once: bool = False) -> None:
        """Reap children that have shut down, and kill those that have not in time, or all `at_once`."""
        for one in list(self.leaving):
            ended = all(pid in self.ended or has_ended(pid) for pid in one.pids)
            if ended or at_once or one.deadline.over():
                self.leaving.remove(one)
                for pid in one.pids:
                    self._end(pid, last=pid == one.pids[-1])
                if one.folder:
                    shutil.rmtree(one.folder, ignore_errors=True)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.ended[pid] = status

    def close(self) -> list[str]:
        """Kill every descendant of this process. Orphans become its children, since it is their subreaper.

        Returns a sentence for each process that did not end.
        """
        deadline = Deadline(LEFT_S, (os.getpid(), *(pid for one in self.leaving for pid in one.pids)))
        while self.leaving:
            self._look_after_leaving(at_once=deadline.over())
            time.sleep(0.005)
        deadline = Deadline(5.0, (os.getpid(),))
        while (pids := children_of(os.getpid())) and not deadline.over():
            self.shared_memory.note(pids)
            for pid in pids:
                kill_session(pid)
                os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.005)
        self.shared_memory.remove(at_the_end=True)
        return [f"process {pid} would not end" for pid in children_of(os.getpid())]


def has_ended(pid: int, deadline: Deadline | None = None) -> bool:
    """Whether a child ends by itself before the deadline, or has ended by now."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if deadline is None or deadline.over():
                return False
            time.sleep(0.002)
    return True


def become(name: str, run_dir: Path) -> None:
    """Make a forked child independent: own session, own log, no terminal; it dies with the zygote."""
    die_with_parent()
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = os.open(run_dir / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # A crash leaves no core file, and takes no time to write one of several GB.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write_stack_at_death()  # to the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # so does SIGUSR1, for a process that hangs


def function_named(target: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, function = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def run(target: str, connection: Connection, argument: Any) -> NoReturn:
    """Call `module:function` and leave without running anything that belongs to the zygote."""
    code = 1
    try:
        function_named(target)(connection, argument)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def watched(run_dir: Path) -> Iterator[None]:
    """End this process at once when standard input ends inside the block, which takes many seconds.

    No thread is left after the block.
    """
    done, finish = os.pipe()

    def watch() -> None:
        readable, _, _ = select.select([sys.stdin.fileno(), done], [], [])
        if done not in readable:
            shutil.rmtree(run_dir, ignore_errors=True)
            os._exit(0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        os.write(finish, b".")
        watcher.join()
        os.close(done)
        os.close(finish)


def main(run_dir: Path, preload: str, arguments: dict[str, Any]) -> int:
    """Call `preload` with its arguments, then fork on demand. The end of standard input ends this process."""
    # Imports leave few cycles, and the collector would walk everything imported again and again: 2.5 s.
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    become_subreaper()
    # Last: a connector may lie in that folder, but nothing there hides a package.
    sys.path.append(os.environ["KVCONFORM_WORKING_FOLDER"])
    server = ForkServer(run_dir)
    try:
        try:
            with watched(run_dir):
                server.ready = ("ready", function_named(preload)(arguments))
        except ModuleNotFoundError as error:
            traceback.print_exc()
            server.ready = (
                "failed",
                "missing",
                f"{error.name} is not installed in this environment: kvconform doctor says what to install",
            )
        except Exception as error:
            traceback.print_exc()
            server.ready = ("failed", "harness", f"{type(error).__name__}: {error}")
        (run_dir / READY).touch()
        gc.enable()
        # Children inherit the heap; without this the collector of each child walks it for a second.
        gc.freeze()
        linux.collapse_into_huge_pages()  # 0.7 s, and a fork takes 11 ms instead of 37
        server.serve()
    finally:
        server.close()
        shutil.rmtree(run_dir, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
