"""A plugin with which the zygotes of tests are forks of one process that has imported vLLM already.

A zygote imports vLLM for 8 to 30 s of a core, and our tests start some 200. The process (`imported_vllm.py`)
is one for each worker of pytest-xdist. It starts with the first zygote. Runs of the command join in with
`-p warm_zygotes`. A zygote that could differ from a fork imports vLLM by itself, as those of users do: one
with another environment, for example.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import pytest

from pytest_kvconform.rigs import launch
from pytest_kvconform.rigs.processes.linux import descendants_of, has_gone

HERE = Path(__file__).parent
ADDRESS = "TESTS_IMPORTED_VLLM"  # environment variable: the socket of a process that already runs
PID = "TESTS_IMPORTED_VLLM_PID"
READY_S = 300.0  # for the first answer
CONNECT_S = 20.0  # until the process listens, which it does before it imports
END_S = launch.CLOSE_S + 10.0  # for the process to end with its zygotes
_at_start: dict[str, str] = {}  # the environment of pytest, before a test changes it
_own: subprocess.Popen[bytes] | None = None
_begin_cold = launch._begin


class Forked:
    """A zygote that another process has forked, with what `launch.Zygote` needs of a `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes], server: socket.socket):
        self.pid, self.stdin, self._server = pid, stdin, server
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        """Wait until it ends. Returns its exit code, or raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                self.returncode = _received(self._server)[1]
            except TimeoutError:
                raise subprocess.TimeoutExpired("a forked zygote", timeout) from None
            except EOFError:  # the process that forked it has ended, and killed it
                self.returncode = -9
            self._server.close()
        return self.returncode

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)


def begin(command: list[str], variables: Mapping[str, str], log: IO[bytes]) -> Any:
    """Start a zygote: a fork, or a process of its own where a fork could differ from it."""
    functions = json.loads(command[-1])["functions"]
    if command[-2] != launch.PRELOAD or launch.STAND_IN in functions or launch._has_gpu():
        return _begin_cold(command, variables, log)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    source, sink = os.pipe()
    try:
        server.settimeout(READY_S)
        _connect(server)
        request = pickle.dumps((command, dict(variables), os.getcwd()))
        socket.send_fds(server, [request], [source, log.fileno()])
        what, value = _received(server)
    except (OSError, EOFError):  # without vLLM the process ends at once
        what, value = "refused", ""
    finally:
        os.close(source)
    if what == "refused":
        os.close(sink)
        server.close()
        return _begin_cold(command, variables, log)
    return Forked(value, os.fdopen(sink, "wb"), server)


def _received(server: socket.socket) -> tuple[Any, ...]:
    message = server.recv(1 << 12)
    if not message:
        raise EOFError
    answer: tuple[Any, ...] = pickle.loads(message)
    return answer


def start() -> None:
    """Start the process that imports vLLM, unless it runs."""
    global _own
    if ADDRESS in os.environ:
        return
    from tests.helpers.case_runner import HIDDEN

    folder = Path(tempfile.mkdtemp(prefix="kvi-", dir=launch.short_temporary_folder()))
    os.environ[ADDRESS] = str(folder / "socket")
    with patch.dict(os.environ, _at_start, clear=True):
        variables = launch.environment(folder)
    with (folder / "log").open("wb") as log:
        _own = subprocess.Popen(
            [sys.executable, str(HERE / "imported_vllm.py"), os.environ[ADDRESS], ",".join(HIDDEN)],
            env=variables | launch.limits_of_kernels(HIDDEN),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.environ[PID] = str(_own.pid)


def descendants() -> list[int]:
    """The pids of all zygotes that are forks, and of all that they started."""
    pid = int(os.environ[PID])
    assert not has_gone(pid), "the process that has imported vLLM has ended"
    return descendants_of(pid)


def _connect(server: socket.socket) -> None:
    start()
    end = time.monotonic() + CONNECT_S
    while True:
        try:
            return server.connect(os.environ[ADDRESS])
        except OSError:
            if time.monotonic() > end or (_own and _own.poll() is not None):
                raise
            time.sleep(0.02)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Lend forks to runs of tests. A run of the suite in this folder has a zygote as users have it."""
    if ADDRESS in os.environ or not config.pluginmanager.has_plugin("kvconform-runner"):
        launch._begin = begin
        _at_start.update(os.environ)


def pytest_unconfigure(config: pytest.Config) -> None:
    global _own
    launch._begin = _begin_cold
    if _own and _own.stdin:
        _own.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            _own.wait(END_S)
        _own.kill()
        _own.wait(5)
        shutil.rmtree(Path(os.environ[ADDRESS]).parent, ignore_errors=True)
        del os.environ[ADDRESS], os.environ[PID]
        _own = None
