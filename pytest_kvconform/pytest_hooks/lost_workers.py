"""End a run of pytest-xdist in which a worker was killed. Registered in xdist's controller."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any

import pytest

LOOK_S = 0.5  # between two looks at whether a worker lives


class LostWorkers:
    """Ends the run when a worker is gone before its work is done.

    xdist itself notices the end of a pipe from the worker. It waits for ever if a process that the worker
    has forked still holds the pipe, and with restarts it gives a case that ends its worker to one worker
    after another. So this class looks at the processes.
    """

    def __init__(self, returncode: int | None = None):
        """`returncode`: exit code of pytest when a worker was lost; None: pytest's code of an interrupt."""
        self.returncode = returncode
        self.sentences: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        if getattr(config.option, "maxworkerrestart", "") is None:
            config.option.maxworkerrestart = "0"

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        if process := _process(node):
            threading.Thread(target=_watch, args=(node, process), daemon=True).start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        if error is None or error == "keyboard-interrupt":
            return
        name = f"worker {node.gateway.id} of pytest-xdist"
        if process := _process(node):
            _end_forks(process)
        self.sentences.append(f"{name} {_how(process) if process else 'is gone'}, and the run ends")
        pytest.exit(self.sentences[-1], returncode=self.returncode)


def _process(node: Any) -> Any:
    """The Popen object of a worker; None if the worker runs elsewhere."""
    return getattr(getattr(node.gateway, "_io", None), "popen", None)


def _watch(node: Any, process: Any) -> None:
    """Tell xdist that a worker is gone. Returns when the process has ended."""
    ended = threading.Event()
    while not ended.wait(LOOK_S):
        try:
            gone = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return  # xdist has reaped it
        if gone is not None:
            # The end of the pipe, and what the worker sent before, come first where they come at all.
            if not ended.wait(LOOK_S) and not node._down:
                node._down = True
                node.notify_inproc("errordown", node=node, error="the process has ended")
            return


def _end_forks(process: Any) -> None:
    """End processes that a worker has forked and left: those that hold the pipe from it."""
    try:
        pipe = os.readlink(f"/proc/self/fd/{process.stdout.fileno()}")
    except (OSError, ValueError):
        return  # execnet has closed it: it came to its end, and nobody else holds it
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            files = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
            if pipe in files and int(pid) != os.getpid():
                os.kill(int(pid), signal.SIGKILL)


def _how(process: Any) -> str:
    """How a worker ended, as the rest of a sentence."""
    try:
        code = process.wait(LOOK_S)
    except Exception:  # it only closed its pipe
        return "does not answer"
    if code == -signal.SIGKILL:
        return (
            "was killed by SIGKILL, most likely because the machine ran out of memory "
            "(-n with a smaller number needs less)"
        )
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
