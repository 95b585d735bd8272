"""Connectors of which scripted workers know too little: what they say, or whose ends they learn of. And those
whose workers begin threads where a model has states, or wait for loads in more than one way.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.kv_cache_interface import MambaSpec

from reference_connector import ReferenceConnector
from reference_connector.connector import Metadata, WorkerReport
from reference_connector.handshake import HandshakeError
from reference_connector.messages import Address

from .designs import Copying, LayerWise
from .leftovers import PoolOfThreads, ThreadOfEachEngine

Answer = tuple[int | None, bool]
Ended = tuple[bool, dict[str, Any] | None]
MEET_S = 5.0
PEERS = 64  # that D remembers
SOON = 100  # steps

# ---- D asks its workers to meet P before it announces anything ----


@dataclass
class Meeting(Metadata):
    meet: list[Address] = field(default_factory=list)


@dataclass
class MetReport(WorkerReport):
    met: Counter[Address] = field(default_factory=Counter)  # how many ranks have met it

    def aggregate(self, other: Any) -> Any:
        both: Any = super().aggregate(other)
        return MetReport(both.notified, both.missed, self.met + other.met)


class MeetsFirst(ReferenceConnector):
    """D announces nothing of a P until all its workers have met this P. It answers None until they have said
    so in metadata of their own.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.size = vllm_config.parallel_config.tensor_parallel_size
        self.left: dict[Address, int] = {}  # ranks that have not met it
        self.new: list[Address] = []
        self.meetings: dict[Address, Iterator[Any]] = {}
        self.met: Counter[Address] = Counter()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        tokens, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not tokens:
            return tokens, asynchronous
        peer = self._scheduler._handoffs[request.request_id].lease.peer
        if peer not in self.left:
            while len(self.left) >= PEERS:
                del self.left[next(iter(self.left))]
            self.left[peer] = self.size
            self.new.append(peer)
        return (None, False) if self.left[peer] > 0 else (tokens, asynchronous)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        new, self.new = self.new, []
        return Meeting(self._scheduler.take_orders(), new)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        for peer, ranks in report.met.items() if isinstance(report, MetReport) else ():
            if peer in self.left:
                self.left[peer] -= ranks

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        for peer in metadata.meet:
            self.meetings[peer] = self._worker._peers.meet(peer, time.monotonic() + MEET_S)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        for peer, meeting in list(self.meetings.items()):
            try:
                next(meeting)
            except (StopIteration, HandshakeError):  # a load from a P that does not answer fails
                del self.meetings[peer]
                self.met[peer] += 1
        return super().get_transfer_results(finished_req_ids)

    def build_connector_worker_meta(self) -> Any:
        report: Any = super().build_connector_worker_meta() or WorkerReport()
        met, self.met = self.met, Counter()
        return (
            MetReport(report.notified, report.missed, met)
            if report.notified or report.missed or met
            else None
        )


@dataclass
class Receipt(Meeting):
    heard: int = 0  # how many meetings of all ranks the scheduler half has heard of


class WantsAReceipt(MeetsFirst):
    """Its scheduler half confirms each report of its workers. A worker whose report is not confirmed soon
    takes its engine for broken, and raises.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.heard = 0  # scheduler half
        self.said = self.steps = 0  # worker half

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        return Receipt(metadata.orders, metadata.meet, self.heard)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        self.heard += report.met.total() if isinstance(report, MetReport) else 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        self.steps = 0 if metadata.heard >= self.said * self.size else self.steps + 1
        if self.steps > SOON:
            raise RuntimeError("the scheduler half has not heard what this worker reported")
        super().start_load_kv(forward_context, **kwargs)

    def build_connector_worker_meta(self) -> Any:
        report = super().build_connector_worker_meta()
        self.said += report.met.total() if isinstance(report, MetReport) else 0
        return report


class MeetsNobody(MeetsFirst):
    """Wrong: no worker is asked to meet P, so D waits for ever."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.new.clear()
        return super().build_connector_meta(scheduler_output)


class LosesALookup(ReferenceConnector):
    """Wrong: D waits for ever for what P has of one request. Its workers have nothing to do with it."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        tokens, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        lost = tokens and request.request_id.endswith("-0000")
        return (None, False) if lost else (tokens, asynchronous)


class SaysNothing(LosesALookup):
    """Wrong in the same way. Its workers report nothing of their own."""

    build_connector_worker_meta = KVConnectorBase_V1.build_connector_worker_meta


# ---- vLLM alone tells the workers that a request has ended ----


class HearsOfEnds(ReferenceConnector):
    """Keeps what a request has, unless it was loaded, for a moment after its end. Its metadata does not name
    the end: the workers know it from vLLM's finished_req_ids.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.loaded: set[str] = set()  # of this half
        self.leased: set[str] = set()
        self.heard: set[str] = set()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.request_id in self._scheduler._loading:
            self.loaded.add(request.request_id)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        loaded = request.request_id in self.loaded
        self.loaded.discard(request.request_id)
        return kept or not loaded, params

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        self.loaded |= metadata.orders.loads.keys()
        self.leased = set(metadata.orders.leases.values())
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        sent, self.heard = self.heard, finished_req_ids - self.leased - self.loaded
        self.loaded -= finished_req_ids
        return KVConnectorTransferResults(
            results.finished_sending | sent, results.finished_recving, results.failed_recving
        )


class HearsNothing(HearsOfEnds):
    """Wrong: its workers report no end."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return super().get_transfer_results(set())


class HearsOfEndsOfD(HearsOfEnds):
    """D alone keeps what a request has after its end."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if is_of_d(self):
            return super().request_finished_all_groups(request, block_ids)
        return ReferenceConnector.request_finished_all_groups(self, request, block_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if is_of_d(self):
            return super().get_transfer_results(finished_req_ids)
        return ReferenceConnector.get_transfer_results(self, finished_req_ids)


class HearsOfEndsOfP(HearsOfEnds):
    """Wrong: D keeps what its requests have, too, and D's workers report no end."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return super().get_transfer_results(set() if is_of_d(self) else finished_req_ids)


def is_of_d(connector: Any) -> bool:
    return bool(connector._vllm_config.kv_transfer_config.kv_role == "kv_consumer")


# ---- threads that hand-overs of some models alone begin ----


class PoolForStates(PoolOfThreads):
    """The process has one pool of threads for states, which the first load with states begins."""

    def begin(self) -> None:
        if any(isinstance(one.kv_cache_spec, MambaSpec) for one in self._kv_cache_config.kv_cache_groups):
            super().begin()


class ThreadForStates(ThreadOfEachEngine):
    """Wrong: each engine of a model with states begins a thread of its own, which shutdown() does not end."""

    def begin(self) -> None:
        if any(isinstance(one.kv_cache_spec, MambaSpec) for one in self._kv_cache_config.kv_cache_groups):
            super().begin()


class PoolForMany(PoolOfThreads):
    """The process has one pool of threads, which the first step with several loads or prefills begins."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata().orders
        self.many = max(len(orders.loads), len(orders.leases)) > 1
        super().start_load_kv(forward_context, **kwargs)

    def begin(self) -> None:
        if self.many:
            super().begin()


# ---- loads that are waited for in more than one way ----


@dataclass
class Mixed(Copying):
    between: set[str] = field(default_factory=set)  # those of its loads that run between steps


class SomeWithinTheStep(LayerWise):
    """Loads every other request within the step that reads it, and the others between steps, as a connector
    that finds some prompts in its own memory, and others elsewhere.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.asked = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not tokens:
            return tokens, False
        self.asked += 1
        (self.between.add if self.asked % 2 else self.between.discard)(request.request_id)
        return tokens, bool(self.asked % 2)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if request.request_id not in self.between or not num_external_tokens:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        self.local.pop(request.request_id, 0)
        ReferenceConnector.update_state_after_alloc(self, request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Mixed:
        metadata = super().build_connector_meta(scheduler_output)
        return Mixed(metadata.orders, metadata.copies, self.between & metadata.orders.loads.keys())

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        if request.request_id not in self.between:
            return super().request_finished_all_groups(request, block_ids)
        self.between.discard(request.request_id)
        self.local.pop(request.request_id, None)
        return ReferenceConnector.request_finished_all_groups(self, request, block_ids)

    # ---- the worker half

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        self.between |= metadata.between
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = ReferenceConnector.get_transfer_results(self, finished_req_ids)
        received = results.finished_recving & self.between
        self.ended |= results.finished_recving - received
        self.again -= results.finished_recving
        self.between -= received
        return KVConnectorTransferResults(
            results.finished_sending, received, results.failed_recving & received
        )
