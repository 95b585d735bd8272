"""A worker half in a process of its own, for a scheduler half that asks it, or waits for what it reports.

The scheduler half of a store may look a prompt up through a worker: in MooncakeStoreConnector,
LookupKeyClient asks LookupKeyServer of rank 0. vLLM has registered the KV caches of all workers before its
scheduler asks. This worker has registered them, too. It takes no step: the reports of workers are those that
a case makes. If the connector waits for what build_connector_worker_meta returns, the worker takes the steps
of its side, see own_reports.py.

A worker is a fork of the nursery, a process that is forked before the case begins. A connector may start
native threads in the process of the case, and a fork of such a process may hang.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any, NoReturn

from model_matrix.variants import few_layers
from pytest_kvconform.case_outcome import CaseEnd, end_of, error_of
from pytest_kvconform.result import HarnessError, ProcessKilled
from pytest_kvconform.rigs.bytes import pool_memory
from pytest_kvconform.rigs.cluster.scripts.failures import DIES
from pytest_kvconform.rigs.engine.clocks import set_ahead
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.linux import die_with_parent
from pytest_kvconform.rigs.processes.zygote import GONE_S, has_ended
from pytest_kvconform.rigs.scheduler.leaks import LATER_S
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf
from pytest_kvconform.rigs.vllm_setup.worker import shut_worker_half_down

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Rig

ENDED = "ended"  # the question how a worker half has ended
DAY = "day"  # what a worker half is told, after which another one is


@dataclass(frozen=True)
class Worker:
    """A worker half that has registered its KV caches."""

    pid: int
    process: str  # the subject of a sentence
    kv_config: Any  # the KVCacheConfig of its engine's scheduler
    cache_config: Any  # the CacheConfig of its engine
    handshake: dict[tuple[int, int], Any]  # what the rank publishes
    line: Connection  # to the process; closed, it shuts the worker half down


class Nursery:
    """Starts worker halves, each in a process of its own, and ends them."""

    def __init__(self, rig: Rig):
        self._rig = rig
        self._line, theirs = Pipe()
        self._workers: list[Worker] = []
        self._pid = os.fork()
        if self._pid == 0:
            self._line.close()
            _serve(rig, theirs)
        theirs.close()

    def start(self, role: str, engine: Any, port: int, blocks: int = 0) -> Worker:
        """Start a worker half, and wait until its KV caches are registered.

        `engine`: the VllmConfig of the scheduler. `port`: number of its port. `blocks`: of its pool, which
        then has the first layers of the model alone; 0: enough for one request. Raises what the worker half
        raises. Waits without a deadline: the scheduler host process judges the worker half if it is late.
        """
        # the worker half says which process it is
        given = engine.kv_transfer_config, engine.model_config
        pid, *found = self._ask(role, *given, port, blocks, of=role)
        line = Connection(recv_handle(self._line))
        kv_config, cache_config, handshake = found
        process = f"the process of {role}'s worker half"
        worker = Worker(pid, process, kv_config, cache_config, handshake, line)
        self._workers.append(worker)
        return worker

    def ended(self, worker: Worker, where: str) -> Exception:
        """The exception for a worker half whose process has ended in a call."""
        try:
            self._ask(ENDED, worker.pid, worker.process, f"{worker.process} ended in {where}", of="P or D")
        except Exception as error:
            return error
        raise AssertionError("a question about an end is answered with an exception")

    def end(self) -> None:
        """Let vLLM shut the worker halves down, and wait until their processes have ended."""
        for worker in self._workers:
            worker.line.close()
        with contextlib.suppress(OSError):  # the nursery has ended
            self._line.send(None)
        os.waitpid(self._pid, 0)

    def _ask(self, *question: Any, of: str) -> Any:
        try:
            with self._rig.host.hook.judging():
                self._line.send(question)
                answer = self._line.recv()
        except (OSError, EOFError):
            raise HarnessError(f"nothing starts {of}'s worker half: its nursery has ended") from None
        if isinstance(answer, CaseEnd):
            raise error_of(answer)
        return answer


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
        if question[0] == ENDED:
            line.send(end_of(_ended(rig, *question[1:])))
            continue
        ours, theirs = Pipe()
        if (pid := os.fork()) == 0:
            for other in (line, ours, *(of for _, of in workers)):
                other.close()
            _work(rig, theirs, *question)
        theirs.close()
        workers.append((pid, ours))
        half = f"{question[0]}'s worker half"
        try:
            answer = ours.recv()
        except EOFError:
            answer = end_of(_ended(rig, pid, half, f"{half} ended its process at the start"))
        if isinstance(answer, CaseEnd):
            line.send(answer)
        else:
            line.send((pid, *answer))
            send_handle(line, ours.fileno(), os.getppid())
    for pid, ours in workers:
        ours.close()
        os.waitpid(pid, 0)


def _work(
    rig: Rig, line: Connection, role: str, transfer: Any, model: Any, port: int, blocks: int
) -> NoReturn:
    """Start the worker half, tell how that ended, and answer the scheduler half until the line is closed.

    Until then it also takes steps: SchedulerOutput and slots -> KVConnectorOutput, or a CaseEnd. DAY: a day
    passes for this process.
    """
    die_with_parent()
    rig.host.hook.judge(os.getpid(), f"the process of {role}'s worker half")
    try:
        half, step = _started(rig, role, transfer, model, port, blocks)
        answer: Any = half.kv_config_of_scheduler, half.config.cache_config, half.handshake_metadata()
    except BaseException as error:
        traceback.print_exc()
        answer = end_of(error)
    days = itertools.count(1)
    with contextlib.suppress(OSError, EOFError):
        line.send(answer)
        while question := line.recv():
            if question == DAY:
                set_ahead(next(days) * LATER_S, monotonic=True)
                continue
            try:
                answer = step(*question)
            except BaseException as error:
                traceback.print_exc()
                answer = end_of(error)
            line.send(answer)
    try:
        shut_worker_half_down()
    except BaseException:
        traceback.print_exc()  # to the log: cases about shutdown judge it
    os._exit(0)


def _started(
    rig: Rig, role: str, transfer: Any, model: Any, port: int, blocks: int
) -> tuple[WorkerHalf, Callable[..., Any]]:
    """A worker half whose KV caches are registered, and what takes a step of it."""
    from pytest_kvconform.rigs.scheduler.store_engine import longest_request, step_of_worker

    geometry = few_layers(rig.geometry) if blocks else rig.geometry
    config = rig.host.single_rank_config(role, geometry)
    config.kv_transfer_config = transfer
    if not blocks:
        config.model_config = model
    longest = longest_request(rig) if blocks else 1
    half = WorkerHalf(rig, role, port=port, longest=longest, config=config, blocks=blocks, geometry=geometry)
    half.construct()
    with pool_memory.pools_of(pool_memory.zeros):
        caches = half.allocate_kv_caches()
    half.register_kv_caches(caches)
    return half, functools.partial(step_of_worker, half, caches)


def _ended(rig: Rig, pid: int, what: str, sentence: str) -> Exception:
    """The exception for a child of this process that has ended, with this sentence.

    ProcessKilled if something outside the run has killed it, as Linux does for want of memory, else
    Violation. `what`: the process, as the subject of a sentence.
    """
    if has_ended(pid, Deadline(GONE_S, (pid,))):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_code == os.CLD_KILLED and ended.si_status == signal.SIGKILL:
            return ProcessKilled(what, pid)
    return rig.violation(DIES, sentence)
