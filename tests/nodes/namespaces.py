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
START_S, ATTEMPTS = 180.0, 5  # for a node to be up
UP = "Ray runtime started"  # what `ray start` prints then
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
            _bring_up(made, which, folders[which], number)
        yield made
    finally:
        for name in names.values():
            _kill_all(name)
            ip("netns", "del", name, check=False)
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)


def _kill_all(name: str) -> None:
    """Kill every process of a namespace."""
    for pid in ip("netns", "pids", name, check=False).stdout.split():
        with contextlib.suppress(OSError):  # it has ended
            os.kill(int(pid), signal.SIGKILL)


def _bring_up(made: Namespaces, which: str, folder: str, count: int) -> None:
    """Start a node, and wait until the cluster has so many.

    Ray gives the processes of a node 30 s (ray/_private/node.py). On a busy machine that may be too little,
    so a node that has ended is started again.
    """
    log = Path(folder) / "start.log"
    for _ in range(ATTEMPTS):
        process = _start(made, which, folder, log)
        deadline = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < deadline:
            # The question takes as much of a core as the start of a node: only once the node says it is up.
            if UP in log.read_text() and _count_nodes(made) == count:
                return
            time.sleep(0.5)
        _kill_all(f"{made.name}{which}")
        process.wait(20)
    pytest.fail(f"a node of the cluster did not start:\n{log.read_text()}")


def _start(made: Namespaces, which: str, folder: str, log: Path) -> subprocess.Popen[str]:
    head = ("--head", f"--port={PORT}", "--include-dashboard=false")
    where = head if which == "a" else (f"--address={ADDRESSES['a']}:{PORT}",)
    options = ("--num-cpus=2", "--num-gpus=0", "--disable-usage-stats", "--block")
    memory = ("--object-store-memory=100000000", f"--temp-dir={folder}")
    command = (str(RAY), "start", *where, f"--node-ip-address={ADDRESSES[which]}", *options, *memory)
    with log.open("w") as output:
        return subprocess.Popen(
            made.inside(which, *command),
            # Both namespaces are of one machine, and UCX would move bytes by shared memory. By default Ray
            # gives its workers the niceness 15, and on a busy machine they get no core for minutes.
            env=os.environ | {"UCX_TLS": "tcp,self", "RAY_worker_niceness": "0"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
        )


def _count_nodes(made: Namespaces) -> int:
    """How many nodes the cluster has."""
    command = made.inside("a", str(RAY), "status", f"--address={ADDRESSES['a']}:{PORT}")
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout.count(" 1 node_")
