"""A Ray cluster of two nodes in two network namespaces, which a pair of virtual interfaces connects."""

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}  # pytest runs in "a"; P in either
PORT = 6399  # in a namespace of its own every port is free
START_S = 300.0
RAY = Path(sys.executable).with_name("ray")


@dataclass(frozen=True)
class Namespaces:
    """Two namespaces with a node of a Ray cluster each."""

    name: str

    def inside(self, which: str, *command: str) -> list[str]:
        """The command that runs another one in a namespace."""
        return ["ip", "netns", "exec", f"{self.name}{which}", *command]

    def crossed(self) -> int:
        """Bytes that have gone from one namespace to the other, in both directions together."""
        said = ip("-n", f"{self.name}a", "-s", "-j", "link", "show", f"{self.name}a").stdout
        counted = json.loads(said)[0]["stats64"]
        return counted["rx"]["bytes"] + counted["tx"]["bytes"]


def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `ip` of iproute2."""
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True, timeout=20)


def why_not() -> str:
    """Why this machine cannot have the namespaces; "": it can."""
    if not shutil.which("ip"):
        return "network namespaces need the command `ip` (iproute2)"
    try:
        ip("netns", "add", f"kv{os.getpid()}")
    except subprocess.CalledProcessError as error:
        return f"network namespaces need root: {error.stderr.strip()}"
    ip("netns", "del", f"kv{os.getpid()}")
    return ""


@contextlib.contextmanager
def two_nodes() -> Iterator[Namespaces]:
    """A cluster for the time of the block. Every process in its namespaces is killed at the end."""
    made = Namespaces(f"kv{os.getpid()}")
    names = {which: f"{made.name}{which}" for which in ADDRESSES}
    folders = {which: tempfile.mkdtemp(prefix="kvr") for which in ADDRESSES}
    started: list[tuple[subprocess.Popen[str], Path]] = []
    try:
        for name in names.values():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip(*f"link add {names['a']} netns {names['a']} type veth".split(), "peer", "name", names["b"])
        ip("link", "set", names["b"], "netns", names["b"])
        for which, name in names.items():
            ip("-n", name, "address", "add", f"{ADDRESSES[which]}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
        for number, which in enumerate(ADDRESSES, 1):  # the second one gives up if there is no first
            started.append(_start(made, which, folders[which]))
            _wait(made, started, number)
        yield made
    finally:
        for name in names.values():
            for pid in ip("netns", "pids", name, check=False).stdout.split():
                with contextlib.suppress(OSError):  # it has ended
                    os.kill(int(pid), signal.SIGKILL)
            ip("netns", "del", name, check=False)
        for process, _ in started:
            process.wait(20)
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)


def _start(made: Namespaces, which: str, folder: str) -> tuple[subprocess.Popen[str], Path]:
    where = ("--head", f"--port={PORT}", "--include-dashboard=false")
    if which != "a":
        where = (f"--address={ADDRESSES['a']}:{PORT}",)
    # UCX finds no shared memory between the namespaces, although they are on one machine
    environment = os.environ | {"UCX_TLS": "tcp,self", "RAY_raylet_start_wait_time_s": "300"}
    command = made.inside(which, str(RAY), "start", *where, f"--node-ip-address={ADDRESSES[which]}")
    options = ("--num-cpus=2", "--num-gpus=0", "--disable-usage-stats", "--block")
    memory = ("--object-store-memory=100000000", f"--temp-dir={folder}")
    with (Path(folder) / "start.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *options, *memory],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
        )
    return process, Path(log.name)


def _wait(made: Namespaces, started: list[tuple[subprocess.Popen[str], Path]], count: int) -> None:
    """Wait until the cluster has so many nodes."""
    address = f"{ADDRESSES['a']}:{PORT}"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for process, log in started:
            assert process.poll() is None, f"a node of the cluster has ended:\n{log.read_text()}"
        done = subprocess.run(
            made.inside("a", str(RAY), "status", f"--address={address}"),
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.stdout.count(" 1 node_") == count:
            return
        time.sleep(1)
    pytest.fail(f"the cluster was not up within {START_S:.0f} s")
