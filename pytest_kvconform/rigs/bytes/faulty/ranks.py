"""Faults in one rank: those of NIXL's agents, or of a connector that can fail on demand.

A connector that does not move bytes with NIXL can have `kvconform_fault`: a method of its class, or a
function of the class's module that gets the connector first. docs/stores.md describes it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from msgspec.structs import replace

from pytest_kvconform.rigs.bytes.faulty import nixl as faulty_nixl
from pytest_kvconform.rigs.bytes.faulty.messages import FaultReport, LoadReport
from pytest_kvconform.rigs.scenario import NEVER, Faults
from pytest_kvconform.rigs.tap import around
from pytest_kvconform.rigs.vllm_setup.worker import worker_half

HOOK = "kvconform_fault"
ALL = -1  # every transfer
# What the hook is asked: see docs/stores.md. COUNT changes nothing.
FAIL, DELAY, DROP, NONE, START, COUNT = "fail", "delay", "drop", "none", "start", ""
# The hook counts the steps that a transfer is late. Steps of these engines compute nothing, and the other
# transfers, in threads of the connector, may need longer for a core than all of these steps.
LATE_STEP_S = 0.01

_loads: list[LoadReport] = []  # of this rank, since the faults were set
_asked: list[Faults] = []  # of the hook, since the faults were set


def hook_of(connector: Any) -> Callable[[str, int, int], int] | None:
    """`kvconform_fault` of a worker half: (what, transfer, steps) -> transfers changed so far. None: it has
    none. MultiConnector has that of the first connector within it that has one.
    """
    if (own := getattr(connector, HOOK, None)) is not None:
        return own
    function = getattr(sys.modules[type(connector).__module__], HOOK, None)
    if function is not None:
        return functools.partial(function, connector)
    return next(filter(None, map(hook_of, getattr(connector, "_connectors", ()))), None)


def hook_has(faults: Faults) -> bool:
    """Whether the hook has such a fault."""
    return not (faults.late or faults.linger or faults.notifications not in ("", NEVER))


def questions(faults: Faults) -> list[tuple[str, int, int]]:
    """What the hook is asked for these faults."""
    what = FAIL if faults.fail else DROP if faults.notifications else DELAY
    return [(what, transfer, faults.hold) for transfer in faults.transfers or (ALL,)]


def set_faults(worker: Any, faults: tuple[Faults, ...]) -> None:
    """Let the transport of this rank have these faults, in place of earlier ones."""
    worker.forget_failed_loads()
    _loads.clear()
    faulty_nixl.set_faults(faults, worker.rank)
    if hook := hook_of(worker_half()):
        hook(NONE, ALL, 0)
        _asked[:] = [one for one in faults if not one.ranks or worker.rank in one.ranks]
        for question in (question for one in _asked for question in questions(one)):
            hook(*question)


def start_held_transfers(worker: Any) -> None:
    """Begin every transfer that a fault holds in this rank."""
    faulty_nixl.start_held_transfers()
    if hook := hook_of(worker_half()):
        hook(START, ALL, 0)


def progress(worker: Any) -> None:
    """Serve the peers of this rank although its engine does not step, see `faulty_nixl.progress`."""
    faulty_nixl.progress()


def progress_of_left(worker: Any) -> None:
    """After shutdown() let what is left of NIXL's agents go on, where a progress thread was asked for.

    Errors do not matter: such a thread would only log them.
    """
    for made in faulty_nixl.agents_made():
        with contextlib.suppress(Exception):
            if made.wants_thread and (agent := made.agent()) is not None:
                agent._progress()
            elif made.wants_thread and (binding := made.binding()) is not None:
                binding.getNotifs({}, [])


def fault_report(worker: Any) -> FaultReport:
    """What the faults did in this rank."""
    report = replace(faulty_nixl.fault_report(), loads=tuple(_loads))
    if hook := hook_of(worker_half()):
        changed = hook(COUNT, ALL, 0)
        failing = [len(one.transfers) or changed for one in _asked if one.fail]
        dropped = any(one.notifications for one in _asked)
        report += FaultReport(
            hooks=1,
            transfers=changed,
            changed=changed,
            failed=min(changed, sum(failing)),
            notifications=changed * dropped,
        )
    return report


def watch_loads(worker: Any) -> None:
    """Note from now on how far the transfers are when a load is reported as finished."""

    def note(hook: Any, finished_req_ids: set[str]) -> Any:
        if any(one.hold for one in _asked):
            time.sleep(LATE_STEP_S)
        found = hook(finished_req_ids)
        note_loads(worker, sorted(set(found.finished_recving or ()) - set(found.failed_recving or ())))
        return found

    around(worker_half(), "get_transfer_results", note)


def note_loads(worker: Any, requests: Iterable[str]) -> None:
    """Note how far the transfers of this rank are: loads of these requests are reported as finished."""
    begun, ended = faulty_nixl.begun_and_ended()
    _loads.extend(LoadReport(worker.rank, request, begun, ended) for request in requests)


def keep_bytes(worker: Any) -> None:
    """Keep what this rank's pool holds now."""
    worker.memory.fetch()
    worker.kept = worker.memory.storage.copy()


def bytes_changed(worker: Any) -> int:
    """Return how many bytes of this rank's pool have changed since `keep_bytes`."""
    worker.memory.fetch()
    return int(np.count_nonzero(worker.kept != worker.memory.storage))
