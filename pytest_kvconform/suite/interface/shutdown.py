"""The shutdown of a connector: what it leaves behind, and whether another connector can follow."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Sized
from typing import Any, TypeVar

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, Violation
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.linux import (
    children_but_pythons,
    listening_sockets,
    mapped_shared_memory,
    threads,
)
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf
from pytest_kvconform.suite.interface._cells import once

Left = TypeVar("Left", bound=Sized)
SOON_S = 2.0  # in which a thread ends that the start of the next engine tells to end
MOMENT_S = 4.0  # that threads and processes may take to end after shutdown(); times --kv-timeout-scale


@case("KV-SHUTDOWN-001", applies=once, rig="scheduler")
def no_threads_ports_or_processes_left(rig: Rig, _: None) -> Evidence:
    """After start and shutdown of both halves, no thread, listening port or process of theirs is left.

    A thread that stays may be one for the process, such as those of ZeroMQ's shared context. A second start
    and shutdown tells: it leaves no more of them. If its start has replaced some of them, a third one must do
    so, too.
    """
    left, stay, halves = _left_by_engines(rig)
    if left:
        reported = " and ".join(
            f"{len(things)} {what} ({', '.join(map(str, things[:4]))})" for what, things in left.items()
        )
        raise rig.violation(
            "",
            f"after shutdown of both halves there are still {reported}",
            diagnosis=f"shutdown() leaves {' and '.join(left)} behind",
        )
    return Evidence(looked_at=halves, unit="halves", notes={"threads of the process": stay.total()})


def threads_of_the_process(rig: Rig, _: None) -> Evidence:
    """Count the threads that stay once for the process: `notes` has name -> how many.

    It is no case: the tier engine asks it about threads that a shutdown has left there.
    """
    stay, halves = _left_by_engines(rig)[1:]
    return Evidence(looked_at=halves, unit="halves", notes=dict(stay))


def _left_by_engines(rig: Rig) -> tuple[dict[str, list[Any]], Counter[str], int]:
    """Start and shut down engines, one, or more if threads stay that may be the process's.

    Returns what they leave behind, the names of the threads that stay once for the process, and how many
    halves were looked at.
    """
    own: set[str] = set()
    left, stay = _left_by_an_engine(rig, own, {})
    if set(left) != {"threads"}:
        return left, Counter(), 2
    with contextlib.suppress(Violation):  # the first engine's threads may keep a second one from starting
        again, then = _left_by_an_engine(rig, own, stay)
        halves = 4
        if not again and then.keys() - stay.keys():
            again, then = _left_by_an_engine(rig, own, then)
            halves = 6
        if not again:
            return again, Counter(then.values()), halves
        return again, Counter(stay.values()) - Counter[str](again.get("threads", [])), halves
    return left, Counter(), 4


def _left_by_an_engine(
    rig: Rig, own: set[str], before: dict[str, str]
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Start and shut down both halves of P. Returns what they leave behind, and id -> name of the threads
    that engines have left by then.

    `own`: ids of the threads of the harness; those that it starts now are added. `before`: the threads that
    earlier engines have left. As many of them may be left now: the start may have ended some of them.
    """
    half = WorkerHalf(rig, "P")
    own |= threads().keys() - before.keys()
    had: set[str | int] = {*listening_sockets(os.getpid()), *children_but_pythons()}
    side = half.start()
    for _ in rig.waits(Deadline(rig.scaled_seconds(SOON_S))):
        if not before.keys() & threads().keys():
            break
        time.sleep(0.02)  # the start may tell a thread to end, and not wait for its end
    started = threads()
    _end(half, side)
    del half, side
    left = once_nothing(rig, lambda: _left(own, before, had))
    now = _of_engines(own)
    # what ends by itself, and not as the next engine starts, is a thread of its engine that ends late
    late = before.keys() & started.keys() - now.keys()
    if not left and late and now.keys() - before.keys():
        left = {"threads": sorted(before[id] for id in late)}
    return left, now


def once_nothing(rig: Rig, look: Callable[[], Left]) -> Left:
    """Wait until `look` finds nothing, at most MOMENT_S. Returns what it found last."""
    found = look()
    for _ in rig.waits(Deadline(rig.scaled_seconds(MOMENT_S))):
        if not found:
            break
        gc.collect()  # some things end when the halves are garbage-collected
        time.sleep(0.02)
        found = look()
    return found


def _of_engines(own: set[str]) -> dict[str, str]:
    """Id -> name of the threads that are not the harness's own."""
    return {id: name for id, name in threads().items() if id not in own}


def _left(own: set[str], before: dict[str, str], had: set[str | int]) -> dict[str, list[Any]]:
    """What there is now. `had`: addresses and pids that were there before the engine."""
    now = _of_engines(own)
    found: dict[str, list[Any]] = {
        "threads": sorted(name for id, name in now.items() if id not in before and len(now) > len(before)),
        "listening ports": [port for port in listening_sockets(os.getpid()) if port not in had],
        "processes": [one for pid, one in children_but_pythons().items() if pid not in had],
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
        once_nothing(rig, half.listening_ports)
        del half, side
        gc.collect()
        held = held or _held()
    if ports[0] != ports[1]:
        raise rig.violation(
            "",
            f"the first engine listened on {ports[0]}, and the second one on {ports[1]}",
            diagnosis="shutdown() does not release the port",
        )
    if more := once_nothing(rig, lambda: dict(_held() - held)):
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
