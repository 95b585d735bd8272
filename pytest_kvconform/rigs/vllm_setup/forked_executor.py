"""An executor whose tensor parallel workers are forked and answer calls over socket pairs.

vLLM's CPU platform sets the start method `spawn` (15 s a worker), and its multiprocessing executor spins on
shared memory, which costs a second per token when there are more workers than cores. This executor forks its
workers before the engine has touched a device, sleeps while it waits for them, and leaves nothing in
/dev/shm. The workers are vLLM's own.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
from vllm.utils.network_utils import get_file_store_init_method
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.linux import die_with_parent
from pytest_kvconform.rigs.processes.stacks import FRAMES, stack_of
from pytest_kvconform.rigs.vllm_setup.answers import pickled, that_travels
from pytest_kvconform.rigs.vllm_setup.engine_config import choose_block_size

REAP_S = 2.0  # for a worker to end after the end of its connection


class WorkerDied(RuntimeError):
    """A worker process is gone. `rank` is its rank, `pid` its process id, `status` its wait status."""

    def __init__(self, rank: int, pid: int, status: int | None = None):
        how = "died"
        if status is not None and os.WIFSIGNALED(status):
            how = f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        super().__init__(f"worker {rank} (process {pid}) {how}")
        self.rank, self.pid = rank, pid


class WorkerKilled(WorkerDied):
    """SIGKILL ended a worker process. The process with the handle knows it by the name of this class."""


def _gone(rank: int, pid: int, status: int | None) -> WorkerDied:
    return (WorkerKilled if status == signal.SIGKILL else WorkerDied)(rank, pid, status)


class ForkedExecutor(Executor):
    """One forked process per rank; the engine core stays in the caller's process.

    Device calls happen in the workers alone, so that forking from a process that has imported everything is
    safe on CUDA too.
    """

    def _init_executor(self) -> None:
        self.workers: list[tuple[int, Connection]] = []
        self.ended: dict[int, int] = {}  # pid -> wait status, of workers that have ended
        init_method = get_file_store_init_method()
        for rank in range(self.parallel_config.world_size):
            here, there = Pipe()
            pid = os.fork()
            if pid == 0:
                here.close()
                for _, other in self.workers:
                    other.close()
                die_with_parent()
                _worker_main(there, self.vllm_config, rank, init_method)
            there.close()
            self.workers.append((pid, here))
        self.collective_rpc("init_device")
        self.collective_rpc("load_model")
        self.collective_rpc(_choose_block_size)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a method of every worker, or a function with every worker.

        Returns the list of results; with `non_block` a future that has it already.
        """
        # as vLLM: what it sends itself by pickle, and functions, which are the suite's, by cloudpickle
        given = pickled((args, kwargs or {})) if isinstance(method, str) else (args, kwargs or {})
        message = cloudpickle.dumps((method, given))
        for rank, (pid, connection) in enumerate(self.workers):
            try:
                connection.send_bytes(message)
            except OSError as error:
                raise _gone(rank, pid, self._reap(pid)) from error
        answers = [self._receive(rank) for rank in range(len(self.workers))]
        for word, answer in answers:
            if word == "raised":
                raise answer
        results = [pickle.loads(answer) if word == "pickled" else answer for word, answer in answers]
        if not non_block:
            return results
        future: Future[list[Any]] = Future()
        future.set_result(results)
        return future

    def _receive(self, rank: int) -> tuple[str, Any]:
        """The answer of a worker: ("pickled", bytes) of vLLM's own call, ("returned", value) or ("raised",
        exception).
        """
        pid, connection = self.workers[rank]
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise _gone(rank, pid, self._reap(pid)) from error
        answer: tuple[str, Any] = cloudpickle.loads(message)
        return answer

    def _reap(self, pid: int) -> int | None:
        """The wait status of a worker whose connection has ended; None: it lives."""
        deadline = Deadline(REAP_S, (pid,))
        while pid not in self.ended:
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                self.ended[pid] = status
            elif deadline.over():
                return None
            time.sleep(0.002)
        return self.ended[pid]

    def _model_call(self, method: str, argument: Any, non_block: bool) -> Any:
        outputs = self.collective_rpc(method, args=(argument,))
        result = self.kv_output_aggregator.aggregate(outputs) if self.kv_output_aggregator else outputs[0]
        if not non_block:
            return result
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        return self._model_call("execute_model", scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._model_call("sample_tokens", grammar_output, non_block)

    def check_health(self) -> None:
        for rank, (pid, _) in enumerate(self.workers):
            if pid in self.ended or os.waitpid(pid, os.WNOHANG)[0]:
                raise WorkerDied(rank, pid)

    def shutdown(self) -> None:
        """End every worker, whatever the others do.

        Then raise what the first of them raised, as vLLM's executor of one rank does.
        """
        raised: list[BaseException] = []
        for rank, (pid, connection) in enumerate(self.workers):
            try:
                connection.send_bytes(cloudpickle.dumps(("shutdown", pickled(((), {})))))
                word, answer = self._receive(rank)
                if word == "raised":
                    raised.append(answer)
            except (WorkerDied, OSError):
                raised.append(WorkerDied(rank, pid))
            connection.close()
            if pid not in self.ended:
                os.waitpid(pid, 0)
        self.workers = []
        if raised:
            raise raised[0]


def _choose_block_size(worker: Any) -> None:
    """Choose the size of blocks in the worker's own configuration, as v1/executor/multiproc_executor.py."""
    choose_block_size(worker.vllm_config)


def _worker_main(connection: Connection, vllm_config: Any, rank: int, init_method: str) -> None:
    """Serve calls until the connection ends or `shutdown` has been called. Never returns."""
    os.environ["LOCAL_RANK"] = str(rank)
    code = 1
    try:
        wrapper = WorkerWrapperBase(rpc_rank=rank)
        kwargs = {
            "vllm_config": vllm_config,
            "local_rank": rank,
            "rank": rank,
            "distributed_init_method": init_method,
            "is_driver_worker": rank == 0,
        }
        wrapper.init_worker([{} for _ in range(rank)] + [kwargs])
        method: str | Callable[..., Any] = "init_worker"
        while method != "shutdown":
            try:
                message = connection.recv_bytes()
            except EOFError:
                break  # the engine is gone
            method, given = cloudpickle.loads(message)
            try:
                args, kwargs = pickle.loads(given) if isinstance(method, str) else given
                result = run_method(wrapper, method, args, kwargs)
                if isinstance(result, AsyncModelRunnerOutput):
                    result = result.get_output()
                answer = ("pickled", pickled(result)) if isinstance(method, str) else ("returned", result)
            except Exception as error:
                traceback.print_exc()
                sent = that_travels(error)
                setattr(sent, FRAMES, stack_of(error))  # a traceback does not travel
                answer = "raised", sent
            connection.send_bytes(cloudpickle.dumps(answer))
        code = 0
    except BaseException:  # the engine reports that this worker died, and the log has the reason
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
