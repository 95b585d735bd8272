"""The shutdown of a connector: what it leaves behind, and whether another connector can follow."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, Violation
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.linux import (
    children_of,
    listening_sockets,
    mapped_shared_memory,
    threads,
)
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf
from pytest_kvconform.suite.interface._cells import once

Left = TypeVar("Left", dict[str, Any], list[int])
MOMENT_S = 4.0  # that threads and processes may take to end after shutdown(); times --kv-timeout-scale


@case("KV-SHUTDOWN-001", applies=once, rig="scheduler")
def no_threads_ports_or_processes_left(rig: Rig, _: None) -> Evidence:
    """After start and shutdown of both halves, no thread, listening port or process of theirs is left.

    A thread that stays may be one for the process, such as those of ZeroMQ's shared context. A second start
    and shutdown tells: it leaves no more of them.
    """
    left = _left_by_an_engine(rig)
    if set(left) == {"threads"}:
        with contextlib.suppress(Violation):  # the first engine's threads may keep a second one from starting
            if not (again := _left_by_an_engine(rig)):
                number = len(left["threads"])
                return Evidence(looked_at=4, unit="halves", notes={"threads of the process": number})
            left = again
    if left:
        reported = " and ".join(
            f"{len(things)} {what} ({', '.join(map(str, things[:4]))})" for what, things in left.items()
        )
        raise rig.violation(
            "",
            f"after shutdown of both halves there are still {reported}",
            diagnosis=f"shutdown() leaves {' and '.join(left)} behind",
        )
    return Evidence(looked_at=2, unit="halves")


def _left_by_an_engine(rig: Rig) -> dict[str, list[Any]]:
    """Start and shut down both halves of P, and return what they leave behind."""
    half = WorkerHalf(rig, "P")
    before = set(threads()), set(listening_sockets(os.getpid()))
    _end(half, half.start())
    del half
    return _once_nothing(rig, lambda: _left(*before))


def _once_nothing(rig: Rig, look: Callable[[], Left]) -> Left:
    """Wait until `look` finds nothing, at most MOMENT_S. Returns what it found last."""
    deadline = Deadline(rig.scaled_seconds(MOMENT_S))
    while (found := look()) and not deadline.over():
        gc.collect()  # some things end when the halves are garbage-collected
        time.sleep(0.02)
    return found


def _left(known: set[str], ports: set[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {
        "threads": sorted(name for id, name in threads().items() if id not in known),
        "listening ports": [port for port in listening_sockets(os.getpid()) if port not in ports],
        "processes": children_of(os.getpid()),
    }
    return {what: things for what, things in found.items() if things}


@case(
    "KV-SHUTDOWN-002", applies=once, variants=lambda cell, matrix: ("started", "half_built"), rig="scheduler"
)
def shutdown_twice_is_harmless(rig: Rig, which: str) -> Evidence:
    """shutdown() can be called twice, also on halves that were built but never registered."""
    half = WorkerHalf(rig, "P")
    if which == "started":
        side = half.start()
    else:
        half.construct()
        side = half.scheduler_side()
    connector = half.connector
    for _ in range(2):
        half.call_hook("shutdown")
        side.call_hook("shutdown")
    _end(half, side)
    del connector
    gc.collect()  # where a connector may call shutdown() once more
    return Evidence(looked_at=6, unit="calls of shutdown()")


@case("KV-SHUTDOWN-003", applies=once, rig="scheduler")
def next_engine_starts_on_same_port(rig: Rig, _: None) -> Evidence:
    """The same process starts a second engine on the same port.

    After the second engine it holds no more files and memory than after the first one.
    """
    held, ports = Counter[str](), []
    for _engine in range(2):
        half = WorkerHalf(rig, "P")
        side = half.start()
        half.step_without_tokens(side)
        ports.append(half.listening_ports())
        _end(half, side)
        _once_nothing(rig, half.listening_ports)
        del half, side
        gc.collect()
        held = held or _held()
    if ports[0] != ports[1]:
        raise rig.violation(
            "",
            f"the first engine listened on {ports[0]}, and the second one on {ports[1]}",
            diagnosis="shutdown() does not release the port",
        )
    if more := _once_nothing(rig, lambda: dict(_held() - held)):
        reported = ", ".join(f"{number} more {what}" for what, number in more.items())
        raise rig.violation(
            "",
            f"after the second engine's end the process has {reported} than after the first one's",
            diagnosis=f"each engine leaves {reported} behind",
        )
    return Evidence(
        looked_at=2,
        unit="engines",
        notes={"ports": ", ".join(map(str, ports[0])) or "none", "open files": sum(held.values())},
    )


def _held() -> Counter[str]:
    """Count what this process has open, by kind: sockets, files, files of shared memory."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the one that listed them
        found["sockets" if name.startswith("socket:") else "open files"] += 1
    found["files of shared memory"] = len(mapped_shared_memory([os.getpid()]))
    return found


def _end(half: WorkerHalf, side: Side) -> None:
    """Shut both halves down as vLLM does: workers first."""
    half.shutdown()
    side.scheduler.shutdown()
    side.scheduler.connector = side.connector = None
