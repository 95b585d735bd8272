"""A worker half in a process of its own, for a scheduler half that asks it.

The scheduler half of a store may look a prompt up through a worker: in MooncakeStoreConnector,
LookupKeyClient asks LookupKeyServer of rank 0. vLLM has registered the KV caches of all workers before its
scheduler asks. This worker has registered them, too, and takes no step: the reports of workers are those that
a case makes.
"""

from __future__ import annotations

import os
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_kvconform.case_outcome import CaseEnd, end_of
from pytest_kvconform.rigs.processes.child import poll
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.linux import die_with_parent
from pytest_kvconform.rigs.scheduler.live.pair import error_of
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf, single_rank_config

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Rig

START_S = 20.0  # times --kv-timeout-scale
_workers: list[tuple[int, Connection]] = []  # of this case: process ids, and the lines to them


def start_worker_beside(rig: Rig, role: str, engine: Any, port: int) -> None:
    """Start a worker half, and wait until its KV caches are registered.

    `engine`: the VllmConfig of the scheduler. `port`: number of its port. Raises what the worker half raises,
    and Violation if its start does not end.
    """
    ours, theirs = Pipe()
    if (pid := os.fork()) == 0:
        ours.close()
        _serve(rig, role, engine, port, theirs)
    theirs.close()
    _workers.append((pid, ours))
    try:
        if not poll(ours, Deadline(rig.scaled_seconds(START_S), (pid,))):
            raise rig.violation("KV-HOOK-002", f"the start of {role}'s worker half does not end")
        failed: CaseEnd | None = ours.recv()
    except EOFError:
        raise rig.violation("KV-HOOK-002", f"{role}'s worker half ended its process at the start") from None
    if failed is not None:
        raise error_of(failed)


def has_workers_beside() -> bool:
    """Whether `end_workers_beside` has something to do."""
    return bool(_workers)


def end_workers_beside() -> None:
    """Let vLLM shut the worker halves down, and wait until their processes have ended."""
    for pid, line in _workers:
        line.close()
        os.waitpid(pid, 0)


def _serve(rig: Rig, role: str, engine: Any, port: int, line: Connection) -> NoReturn:
    """Start the worker half, tell so, and answer the scheduler half until the line is closed."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    die_with_parent()
    kv_transfer_state._KV_CONNECTOR_AGENT = None  # the parent's, if it has one
    for _, of_others in _workers:
        of_others.close()
    failed = None
    try:
        config = single_rank_config(rig, role)
        config.kv_transfer_config, config.model_config = engine.kv_transfer_config, engine.model_config
        half = WorkerHalf(rig, role, config=config, port=port)
        half.construct()
        half.register_kv_caches(half.allocate_kv_caches())
    except BaseException as error:
        traceback.print_exc()
        failed = end_of(error)
    try:
        line.send(failed)
        line.poll(None)
        kv_transfer_state.ensure_kv_transfer_shutdown()
    except BaseException:
        traceback.print_exc()  # to the log: cases about shutdown judge it
    os._exit(0)
