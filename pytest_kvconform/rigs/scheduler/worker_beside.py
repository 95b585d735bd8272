"""A worker half in a process of its own, for a scheduler half that asks it.

The scheduler half of a store may look a prompt up through a worker: in MooncakeStoreConnector,
LookupKeyClient asks LookupKeyServer of rank 0. vLLM has registered the KV caches of all workers before its
scheduler asks. This worker has registered them, too, and takes no step: the reports of workers are those that
a case makes.
"""

from __future__ import annotations

import os
import signal
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from pytest_kvconform.case_outcome import CaseEnd, end_of
from pytest_kvconform.rigs.processes.child import poll
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.linux import die_with_parent
from pytest_kvconform.rigs.scheduler.live.pair import error_of
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Rig

START_S = 20.0  # times --kv-timeout-scale


def start_worker_beside(rig: Rig, role: str) -> None:
    """Start the worker half, and wait until its KV caches are registered. It ends with this process.

    Raises what it raises, and Violation if its start does not end.
    """
    ours, theirs = Pipe()
    if (pid := os.fork()) == 0:
        ours.close()
        _serve(rig, role, theirs)
    theirs.close()
    try:
        if not poll(ours, Deadline(rig.scaled_seconds(START_S), (pid,))):
            raise rig.violation("KV-HOOK-002", f"the start of {role}'s worker half does not end")
        failed: CaseEnd | None = ours.recv()
    except EOFError:
        raise rig.violation("KV-HOOK-002", f"{role}'s worker half ended its process at the start") from None
    if failed is not None:
        raise error_of(failed)


def _serve(rig: Rig, role: str, line: Connection) -> NoReturn:
    """Start the worker half, tell so, and answer the scheduler half until the parent ends."""
    die_with_parent()
    failed = None
    try:
        half = WorkerHalf(rig, role)
        half.construct()
        half.register_kv_caches(half.allocate_kv_caches())
    except BaseException as error:
        traceback.print_exc()
        failed = end_of(error)
    line.send(failed)
    while True:
        signal.pause()
