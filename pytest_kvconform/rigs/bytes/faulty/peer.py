"""The engine process of the peer rig: ranks record their worker halves; requests can be kept queued."""

from __future__ import annotations

import contextlib
import gc
import pickle
import time
from typing import Any

from pytest_kvconform.rigs.bytes.faulty import ranks as rank_faults
from pytest_kvconform.rigs.bytes.faulty.engine import FaultyEngineProcess
from pytest_kvconform.rigs.bytes.faulty.messages import COMPUTED, FAILED, KNOWN, REPORTED
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec
from pytest_kvconform.rigs.engine import ends
from pytest_kvconform.rigs.engine import process as engine_process
from pytest_kvconform.rigs.engine.messages import Request, Step, Trace
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scenario import Faults
from pytest_kvconform.rigs.tap import around
from pytest_kvconform.rigs.vllm_setup.compat import defer_reports_of_failed_step
from pytest_kvconform.rigs.vllm_setup.hooks import RECVING, UPDATE
from pytest_kvconform.rigs.vllm_setup.overrides import keep_heap_collectable

TICK_S = 0.01


def serve(connection: Any, spec: ByteEngineSpec) -> None:
    """Run the engine in a child of the zygote, see `engine.process.serve`."""
    engine_process.serve(connection, spec, PeerEngineProcess)


def _pickled(value: Any) -> bytes:
    """A value as it travels from a worker; b"": it does not survive that, as another case finds."""
    with contextlib.suppress(Exception):
        return pickle.dumps(value)
    return b""


class WorkerFailed(Exception):
    """A step that is to look as if one of its workers had failed."""


class PeerEngineProcess(FaultyEngineProcess):
    """One byte engine.

    Other requests overwrite P's blocks as soon as they are freed, so that a late read of them is noticed.
    """

    most_calls = 1000  # all scenarios of a cell run at once
    timed = ("start_load_kv",)

    def __init__(self, spec: ByteEngineSpec):
        self.kept_in_queue: set[str] = set()
        self.asked_only: set[str] = set()
        self.abort_at: dict[str, str] = {}  # request -> moment of MOMENTS
        self.aborted_ids: list[str] = []
        self.faults_of_next_load: tuple[Faults, ...] = ()
        keep_heap_collectable()
        super().__init__(spec)
        self.reuse(spec.role == "P")

    def finished_count(self) -> int:
        """How many ranks report each request: get_finished_count, or all ranks."""
        aggregator = self.core.model_executor.kv_output_aggregator  # None where one worker needs none
        return int(aggregator._expected_finished_count) if aggregator and self.spec.tensor_parallel > 1 else 1

    def has_read_load(self, request_id: str) -> bool:
        """Whether vLLM's scheduler has read that the load of a request has ended."""
        return bool(self.recorder.history().naming(UPDATE, RECVING, request_id))

    def all_traces(self) -> dict[str, Trace]:
        """The trace of every request."""
        return {request_id: self.trace(request_id) for request_id in self.traces}

    def keep_in_queue(self, request_id: str) -> None:
        """Keep a request, which is added later, from being scheduled.

        get_num_new_matched_tokens answers None for the request. MultiConnector does the same while one of its
        connectors does not know yet.
        """
        self.kept_in_queue.add(request_id)

    def ask_and_keep_in_queue(self, request_id: str) -> None:
        """As `keep_in_queue`; the connector is asked, and the request gets no block."""
        self.asked_only.add(request_id)

    def add_without_prefix_cache(self, request: Request) -> None:
        """Add a request that must not read the prefix cache, as one that asks for prompt_logprobs.

        vLLM drops what the connector answers (Scheduler.schedule, skip_reading_prefix_cache).
        """
        self.add(request)
        self.scheduler.requests[request.id].skip_reading_prefix_cache = True

    def reset_prefix_cache(self) -> bool:
        """Let the engine's own prefix cache forget every block, as it does when others need them. Returns
        whether it did: vLLM does not while a block is in use.
        """
        return bool(self.scheduler.reset_prefix_cache())

    def let_schedule(self, request_id: str) -> None:
        """Let the request be scheduled from now on."""
        self.kept_in_queue.discard(request_id)

    def abort_at_end_of_load(self, request_id: str, moment: str) -> None:
        """Abort a request at this moment (`MOMENTS`) of the step in which the ranks report its load.

        With FAILED that step fails, as soon as one rank reports the load, and every request is aborted.
        """
        self.abort_at[request_id] = moment

    def step(self, seconds: float) -> Step:
        """As for every engine. After a failed step the requests are aborted, and the engine goes on
        (v1/fault_tolerance/engine_core_sentinel.py: EngineCoreSentinel.on_fault).
        """
        from vllm.v1.request import RequestStatus

        try:
            return super().step(seconds)
        except WorkerFailed:
            self.scheduler.finish_requests(list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED)
            return Step(outputs=(), computed=0)

    def aborted(self) -> tuple[str, ...]:
        """Requests that were aborted at the end of their loads."""
        return tuple(self.aborted_ids)

    def add_and_abort(self, request: Request) -> None:
        """Add a request and abort it before a step.

        vLLM does this with a request that its API server refuses, and with one that comes while the engine is
        paused (v1/engine/core.py: EngineCoreProc._reject_add_while_paused).
        """
        self.add(request)
        self.abort(request.id)

    def pause(self, paused: bool) -> None:
        """Let the scheduler admit no request, as EngineCore.pause_scheduler does, or admit requests again."""
        from vllm.v1.core.sched.interface import PauseState

        self.scheduler.set_pause_state(PauseState.PAUSED_NEW if paused else PauseState.UNPAUSED)

    def set_faults(self, faults: tuple[Faults, ...]) -> None:
        """As for every engine; the next load has no other faults any more."""
        self.faults_of_next_load = ()
        super().set_faults(faults)

    def set_faults_of_next_load(self, faults: tuple[Faults, ...]) -> None:
        """Give the transport of every rank these faults when the next load has its blocks.

        A connector may read something else from P before, to know what it can load.
        """
        self.set_faults(())
        self.faults_of_next_load = faults

    def start_held_transfers(self) -> None:
        """Start the transfers that were held (`set_faults`)."""
        self._workers(rank_faults.start_held_transfers)

    def shutdown_during_loads(self) -> str:
        """Shut down as vLLM does, whatever is under way, and keep what the pools hold when that is done.

        Then garbage is collected, as vLLM does (v1/engine/core.py: EngineCore.shutdown): some transports end
        with the objects that they serve. Returns what was raised, or "".
        """
        self.is_shut_down = True
        error, _ = ends.end_core(self)
        gc.collect()
        self._workers(rank_faults.keep_bytes)
        return error

    def written_since_shutdown(self, seconds: float) -> int:
        """Return how many bytes of all pools have changed since `shutdown_during_loads`.

        For these seconds an agent of NIXL that is left goes on, if it would have a thread for that. Garbage
        is collected meanwhile: a thread of the connector may have held it for a moment.
        """
        deadline = Deadline(seconds)
        while not deadline.over():
            gc.collect()
            self._workers(rank_faults.progress_of_left)
            time.sleep(TICK_S)
        return sum(self._workers(rank_faults.bytes_changed))

    def _watch_steps(self) -> None:
        super()._watch_steps()
        self._watch_reports()
        update = self.scheduler.update_from_output

        def update_from_output(scheduler_output: Any, output: Any) -> Any:
            report, before = getattr(output, "kv_connector_output", None), len(self.recorder.calls)
            self._abort(REPORTED, self._loads_told_in([report] if report else []))
            self._abort(COMPUTED, scheduler_output.num_scheduled_tokens)
            found = update(scheduler_output, output)
            self._abort(KNOWN, self._loads_read_since(before))
            return found

        self.scheduler.update_from_output = update_from_output

    def _loads_read_since(self, before: int) -> set[str]:
        """Requests that the scheduler has read as loaded. `before`: calls of hooks at that time."""
        reports = [call.result for call in self.recorder.calls[before:] if call.hook == UPDATE]
        return {request for one in reports for request in one[RECVING]}

    def _watch_reports(self) -> None:
        """Let the step fail in which a rank reports the load of a request that is to be aborted at FAILED.

        The reports of all ranks come with those of the next step, as those of workers that have answered
        (v1/executor/multiproc_executor.py: MultiprocExecutor.collective_rpc).
        """
        aggregator = self.core.model_executor.kv_output_aggregator
        if (defer := defer_reports_of_failed_step(aggregator)) is None:
            return
        aggregate = aggregator.aggregate

        def aggregate_unless_failed(outputs: list[Any], *more: Any) -> Any:
            reports = [out.kv_connector_output for out in outputs if out and out.kv_connector_output]
            failing = [name for name in self._loads_told_in(reports) if self.abort_at.get(name) == FAILED]
            if not failing:
                return aggregate(outputs, *more)
            self.aborted_ids.append(failing[0])
            del self.abort_at[failing[0]]
            defer(reports)
            raise WorkerFailed

        aggregator.aggregate = aggregate_unless_failed

    def _loads_told_in(self, reports: list[Any]) -> set[str]:
        """Requests that the workers name as loaded: in finished_recving, or in metadata of their own, from
        which update_connector_output may put them into the report. Of the latter, those that are to be
        aborted, while they wait.
        """
        told = {name for report in reports for name in report.finished_recving or ()}
        own = [_pickled(meta) for report in reports if (meta := report.kv_connector_worker_meta) is not None]
        waiting = [name for name in self.abort_at if self._waits_for_remote_kv(name)] if own else ()
        return told | {name for name in waiting if any(name.encode() in one for one in own)}

    def _waits_for_remote_kv(self, request_id: str) -> bool:
        from vllm.v1.request import RequestStatus

        request = self.scheduler.requests.get(request_id)
        return request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    def _abort(self, moment: str, requests: Any) -> None:
        """Abort those of the requests that are to be aborted at this moment."""
        for request in [name for name in requests if self.abort_at.get(name) == moment]:
            del self.abort_at[request]
            self.aborted_ids.append(request)
            self.abort(request)

    def _watch_connector(self) -> None:
        super()._watch_connector()

        def set_faults(hook: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens and self.faults_of_next_load:
                trace = self.traces.get(request.request_id)
                # no step could end while a load within it is held
                if (trace and trace.asynchronous) or not any(one.hold for one in self.faults_of_next_load):
                    self.set_faults(self.faults_of_next_load)
            hook(request, blocks, num_external_tokens)

        def keep_in_queue(hook: Any, request: Any, num_computed_tokens: int) -> Any:
            if request.request_id in self.kept_in_queue:
                return None, False
            answer = hook(request, num_computed_tokens)
            return (None, False) if request.request_id in self.asked_only else answer

        around(self.scheduler.connector, "get_num_new_matched_tokens", keep_in_queue)
        around(self.scheduler.connector, "update_state_after_alloc", set_faults)
