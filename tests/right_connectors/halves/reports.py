"""A scheduler half that puts requests into the report of its workers, or tells workers of releases late."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from reference_connector import ReferenceConnector
from reference_connector.connector import WorkerReport
from reference_connector.scheduler import LeaseState

from ..answers import LoadsAgain
from ..leftovers import KeepsEveryEnd

BATCH_S = 1.0  # for which releases are collected before D tells P
ENDS_S = 0.3  # for which ends are collected before workers hear of them


@dataclass
class Ends(WorkerReport):
    """What the worker has ended: requests whose blocks of P are read, and loads of D."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)

    def aggregate(self, other: Any) -> Any:
        raise NotImplementedError("there is one rank")


class ReportsInScheduler(ReferenceConnector):
    """The worker names no request in finished_sending and finished_recving. It tells its scheduler half of
    ends in metadata of its own, and update_connector_output puts them into the report, which vLLM's scheduler
    reads after it (v1/core/sched/scheduler.py: _update_from_kv_xfer_finished). The worker itself names
    failures: vLLM reads them before.

    For one rank: of several, KVOutputAggregator passes a failure on only beside a finished_recving of all.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            raise ValueError("ReportsInScheduler has one rank")
        self.ends = Ends()

    # ---- the worker half

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = super().get_transfer_results(finished_req_ids)
        self.ends.sent |= found.finished_sending
        self.ends.received |= found.finished_recving
        return KVConnectorTransferResults(failed_recving=found.failed_recving)

    def build_connector_worker_meta(self) -> Ends | None:
        report: Any = super().build_connector_worker_meta() or WorkerReport()
        ends, self.ends = self.ends, Ends()
        ends.notified, ends.missed = report.notified, report.missed
        return ends if ends != Ends() else None

    # ---- the scheduler half

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(ends := connector_output.kv_connector_worker_meta, Ends):
            self.put(connector_output, ends.sent, ends.received)
        super().update_connector_output(connector_output)

    def put(self, report: Any, sent: Iterable[str], received: Iterable[str]) -> None:
        """Put requests into the report that vLLM's scheduler is about to read."""
        report.finished_sending = {*(report.finished_sending or ()), *sent} or None
        report.finished_recving = {*(report.finished_recving or ()), *received} or None


class EndsWhatIsOrdered(ReportsInScheduler):
    """Wrong: the scheduler half ends each load in the report of the step that orders it, and no rank has."""

    def put(self, report: Any, sent: Iterable[str], received: Iterable[str]) -> None:
        super().put(report, sent, ())

    def update_connector_output(self, connector_output: Any) -> None:
        self.put(connector_output, (), ())
        begun = set(self._scheduler._loading)
        connector_output.finished_recving = begun or None
        super().update_connector_output(connector_output)


class ForgetsSends(ReportsInScheduler):
    """Wrong: the scheduler half puts no request of P into a report."""

    def put(self, report: Any, sent: Iterable[str], received: Iterable[str]) -> None:
        super().put(report, (), received)


class TakesOutLoads(ReferenceConnector):
    """Wrong: the scheduler half takes every second load out of the report, and never puts it back."""

    seen = 0

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for request in sorted(connector_output.finished_recving or ()):
            self.seen += 1
            if not self.seen % 2:
                connector_output.finished_recving.discard(request)


class ParksReports(ReferenceConnector):
    """A rank names every second request that it has sent once more, some steps later, as a peer that tells P
    twice. The scheduler half takes such reports out, as it parks those that come too early.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.again: list[str] = []  # of the worker half
        self.kept: set[str] = set()  # of the scheduler half: requests whose blocks vLLM keeps

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = super().get_transfer_results(finished_req_ids)
        again, self.again = self.again, sorted(found.finished_sending)[::2]
        found.finished_sending |= set(again)
        return found

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        kept, params = super().request_finished_all_groups(request, block_ids)
        if kept:
            self.kept.add(request.request_id)
        return kept, params

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        sent = (connector_output.finished_sending or set()) & self.kept
        self.kept -= sent
        connector_output.finished_sending = sent or None


class BatchesReleases(ReferenceConnector):
    """D collects for a second the leases that it needs no more, and tells P then. has_pending_push_work is
    true until it has told all of them, so that vLLM steps an engine without requests.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.since = 0.0  # when the first of them came; 0.0: there is none
        if hasattr(self, "_scheduler"):
            every = self._scheduler._in_state
            self._scheduler._in_state = lambda state: self.batched(state, every(state))

    def batched(self, state: LeaseState, leases: list[Any]) -> list[Any]:
        """The leases in a state; no unused one before it is time."""
        if state is not LeaseState.UNUSED or not leases:
            return leases
        self.since = self.since or time.monotonic()
        if time.monotonic() - self.since < BATCH_S:
            return []
        self.since = 0.0
        return leases


class BatchesWhileIdle(BatchesReleases):
    """Wrong: has_pending_push_work is false meanwhile, so that vLLM does not step D, and P is never told."""

    def has_pending_push_work(self) -> bool:
        return False


class LoadsAgainLater(BatchesReleases, LoadsAgain):
    """D loads the same blocks again after a preemption, and tells P a second later that its request has
    ended.
    """


class BatchesEnds(KeepsEveryEnd):
    """Keeps the blocks of every request for some steps after its workers have heard of its end. They hear of
    those of a moment at once: vLLM steps on while blocks are kept (Scheduler.has_finished_requests).
    """

    since = 0.0  # when the first of them came; 0.0: there is none

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        ends, now = self.drain, time.monotonic()
        self.since = (self.since or now) if ends else 0.0
        if early := now - self.since < ENDS_S:
            self.drain = []
        metadata = super().build_connector_meta(scheduler_output)
        if early:
            self.drain = ends
        return metadata
