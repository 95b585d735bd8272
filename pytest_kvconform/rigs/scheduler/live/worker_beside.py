"""A worker half in a process of its own, for a scheduler half that asks it.

The scheduler half of a store may look a prompt up through a worker: in MooncakeStoreConnector,
LookupKeyClient asks LookupKeyServer of rank 0. vLLM has registered the KV caches of all workers before its
scheduler asks. This worker has registered them, too, and takes no step: the reports of workers are those that
a case makes.

A worker is a fork of the nursery, a process that is forked before the case begins. A connector may start
native threads in the process of the case, and a fork of such a process may hang.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_kvconform.case_outcome import CaseEnd, end_of, error_of
from pytest_kvconform.result import HarnessError
from pytest_kvconform.rigs.processes.linux import die_with_parent
from pytest_kvconform.rigs.scheduler.live import ends
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Rig


class Nursery:
    """Starts worker halves, each in a process of its own, and ends them."""

    def __init__(self, rig: Rig):
        self._rig = rig
        self._line, theirs = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._line.close()
            _serve(rig, theirs)
        theirs.close()

    def start(self, role: str, engine: Any, port: int) -> None:
        """Start a worker half, and wait until its KV caches are registered.

        `engine`: the VllmConfig of the scheduler. `port`: number of its port. Raises what the worker half
        raises. Waits without a deadline: the scheduler host process judges the worker half if it is late.
        """
        try:
            with self._rig.host.hook.judging():  # the worker half says which process it is
                self._line.send((role, engine.kv_transfer_config, engine.model_config, port))
                failed: CaseEnd | None = self._line.recv()
        except (OSError, EOFError):
            raise HarnessError(f"nothing starts {role}'s worker half: its nursery has ended") from None
        if failed is not None:
            raise error_of(failed)

    def end(self) -> None:
        """Let vLLM shut the worker halves down, and wait until their processes have ended."""
        with contextlib.suppress(OSError):  # the nursery has ended
            self._line.send(None)
        os.waitpid(self._pid, 0)


def _serve(rig: Rig, line: Connection) -> NoReturn:
    """Run the nursery. Ends the process."""
    die_with_parent()
    try:
        _start_workers(rig, line)
    except BaseException:
        traceback.print_exc()  # to the log: `start` finds that the nursery has ended
    finally:
        os._exit(0)


def _start_workers(rig: Rig, line: Connection) -> None:
    """Start a worker half for each question, until the question is None."""
    workers: list[tuple[int, Connection]] = []
    while (question := line.recv()) is not None:
        ours, theirs = Pipe()
        if (pid := os.fork()) == 0:
            for other in (line, ours, *(of for _, of in workers)):
                other.close()
            _work(rig, theirs, *question)
        theirs.close()
        workers.append((pid, ours))
        try:
            line.send(ours.recv())
        except EOFError:
            half = f"{question[0]}'s worker half"
            line.send(end_of(ends.end(rig, pid, half, f"{half} ended its process at the start")))
    for pid, ours in workers:
        ours.close()
        os.waitpid(pid, 0)


def _work(rig: Rig, line: Connection, role: str, transfer: Any, model: Any, port: int) -> NoReturn:
    """Start the worker half, tell how that ended, and answer the scheduler half until the line is closed."""
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    die_with_parent()
    rig.host.hook.judge(os.getpid(), f"the process of {role}'s worker half")
    failed = None
    try:
        config = rig.host.single_rank_config(role)
        config.kv_transfer_config, config.model_config = transfer, model
        half = WorkerHalf(rig, role, config=config, port=port)
        half.construct()
        half.register_kv_caches(half.allocate_kv_caches())
    except BaseException as error:
        traceback.print_exc()
        failed = end_of(error)
    try:
        line.send(failed)
        line.poll(None)
        ensure_kv_transfer_shutdown()
    except BaseException:
        traceback.print_exc()  # to the log: cases about shutdown judge it
    os._exit(0)
