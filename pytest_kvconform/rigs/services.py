"""The services of one run, as pytest's process sees them: their ports, their guard, their end.

The guard (`processes/guard.py`) is the parent of every service.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pytest_kvconform.rigs.launch import PREFIX, environment, short_temporary_folder
from pytest_kvconform.rigs.processes.guard import (
    KILL_S,
    LEAVE_S,
    PID_FILE,
    PROBLEM_FILE,
    READY_FILE,
    Order,
)
from pytest_kvconform.rigs.processes.linux import has_gone, is_ending
from pytest_kvconform.rigs.processes.ports import free_port
from pytest_kvconform.services import Service, fill, fill_text
from pytest_kvconform.services.reading import address_of

if TYPE_CHECKING:
    from pytest_kvconform.settings import Settings
    from pytest_kvconform.subject import Subject

MARK = "_KVCONFORM_SERVICES"  # variable of every process of the services of a run: its folder
LOGS = "services"  # folder of their logs, in that of the report
TOLD_S = 30.0  # for the guard to tell of a service that has ended
END_S = LEAVE_S + KILL_S + 10.0  # for the guard to end everything
_GUARD = "the guard (the process that keeps the services) is gone; did somebody kill it?"


class RunningServices:
    """The services of a run. Ports are drawn at once; the services start with `start`.

    `subject` is the subject with its placeholders filled in, `environment` what engines get in addition, and
    `folder` what `problem` is asked with, in any process of the run.
    """

    def __init__(self, subject: Subject, settings: Settings):
        self._ports: dict[tuple[str, str], int] = {}
        self._logs = Path(settings.report) / LOGS
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}services-", dir=short_temporary_folder()))
        # a session of its own: Ctrl-C is for pytest alone
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "pytest_kvconform.rigs.processes.guard", str(self.folder)],
            env=_environment(self.folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        (self.folder / PID_FILE).write_text(str(self._guard.pid))
        self.subject: Subject = msgspec.structs.replace(subject, config=fill(subject.config, self._place_of))
        self.environment: dict[str, str] = {}
        for service in subject.services:
            self.environment |= self._filled(service.engine_environment, service.name)
        self._orders = [self._order(one, settings.timeout_scale) for one in subject.services]

    def _place_of(self, service: str, what: str, which: str) -> int | str:
        if what == "folder":
            return str(self.folder / service)
        if (service, which) not in self._ports:
            self._ports[service, which] = free_port()
        return self._ports[service, which]

    def _filled(self, texts: dict[str, str], service: str) -> dict[str, str]:
        return {key: fill_text(text, self._place_of, service) for key, text in texts.items()}

    def _order(self, service: Service, scale: float) -> Order:
        ready = fill_text(service.ready, self._place_of, service.name)
        address = address_of(ready)
        return Order(
            name=service.name,
            command=[fill_text(word, self._place_of, service.name) for word in service.command],
            ready=ready,
            address=[*address] if address else None,
            deadline=service.deadline * scale,
            environment=self._filled(service.environment, service.name),
            files=self._filled(service.files, service.name),
            folder=str(self.folder / service.name),
            log=str(self._logs / f"{service.name}.log"),
        )

    def start(self) -> str:
        """Start the services, one after the other. Returns a sentence if one does not come up, else ""."""
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            for order in self._orders:  # of an earlier run
                Path(order.log).unlink(missing_ok=True)
        except OSError as error:
            return f"the logs of the services cannot be written to {self._logs}: {error.strerror}"
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the guard is gone: `problem` tells
            self._guard.stdin.write(json.dumps([order._asdict() for order in self._orders]).encode() + b"\n")
            self._guard.stdin.flush()
        # each wait of the guard has a deadline, so this one needs none
        while not (self.folder / READY_FILE).exists():
            if self._guard.poll() is not None:
                return _GUARD
            if sentence := _told(self.folder):
                return sentence
            time.sleep(0.02)
        return ""

    def close(self) -> list[str]:
        """End the services. Returns sentences about what did not end as asked."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        problems = []
        try:
            self._guard.wait(END_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait(5)
            problems.append(f"the guard of the services (process {self._guard.pid}) had to be killed")
        if self._guard.returncode:
            _kill_marked(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)  # normally gone by now
        return problems


def _environment(folder: Path) -> dict[str, str]:
    """The environment of the guard and of every service: that of the engines.

    Commands of this Python's environment are found last, as pytest may have been started by its path.
    """
    variables = environment(folder)
    path = os.pathsep.join([variables.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    return variables | {"PATH": path, MARK: str(folder)}


def problem(folder: str, wait: bool = False) -> str:
    """Return a sentence if a service of the run is not there any more, else "".

    `wait`: something has failed, and if a service has just ended, the guard is about to tell.
    """
    place = Path(folder)
    if (sentence := _told(place)) or not wait:
        return sentence
    try:
        guard = int((place / PID_FILE).read_text())
        pids: list[int] = json.loads((place / READY_FILE).read_text())
    except (OSError, ValueError):
        return _GUARD
    if has_gone(guard):
        return _GUARD
    deadline = time.monotonic() + TOLD_S
    while any(is_ending(pid) for pid in pids):
        if sentence := _told(place):
            return sentence
        if time.monotonic() > deadline:
            return "a service has ended in the middle of the run, and its guard does not tell which one"
        time.sleep(0.01)
    return ""


def _told(folder: Path) -> str:
    try:
        return (folder / PROBLEM_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _kill_marked(folder: Path) -> None:
    """Kill what the services of this run started, after their guard was killed."""
    mark = f"{MARK}={folder}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            if int(name) != os.getpid() and mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                os.kill(int(name), signal.SIGKILL)
