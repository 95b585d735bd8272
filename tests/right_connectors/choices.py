"""Connectors that choose otherwise what P names, where a load is refused, in how many steps it is ordered,
from whom D loads, and what the scheduler half remembers until its workers report.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id
from vllm.v1.request import RequestStatus

from reference_connector import ReferenceConnector
from reference_connector.connector import Metadata, WorkerReport
from reference_connector.messages import Load

CLOSED_S = 3.0  # for which D loads nothing from a P after a failure


class NamesWholeBlocks(ReferenceConnector):
    """P names whole blocks alone, and D computes what is behind them. States and windows need all of P."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        keeps, params = super().request_finished_all_groups(request, block_ids)
        groups = self._scheduler._groups
        if not params or any(group.state or group.window for group in groups):
            return keeps, params
        if not (whole := request.num_computed_tokens // groups[0].tokens):
            self._scheduler._orders.leases.pop(params["remote_lease"], None)
            return False, None
        ids = [table[:whole] for table in params["remote_block_ids"]]
        return keeps, params | {"remote_block_ids": ids, "remote_num_tokens": whole * groups[0].tokens}


@dataclass
class Refusals(Metadata):
    """Orders, and requests whose loads the workers report as failed."""

    refused: list[str] = field(default_factory=list)


class RefusesInTheWorker(ReferenceConnector):
    """Announces a load for every request that asks for one, and reads the params when it has blocks. If they
    are bad, its workers report the load as failed. No order names a block: nothing is loaded.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.bad: set[str] = set()
        self.refused: list[str] = []  # by the scheduler half, to tell the workers; by those, to report

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        params = request.kv_transfer_params
        asks = isinstance(params, dict) and params.get("do_remote_prefill") is True
        if asks and request.request_id not in self._scheduler._handoffs:
            self.bad.add(request.request_id)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id not in self.bad:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        left = max(0, request.num_prompt_tokens - 1 - num_computed_tokens)
        return left, left > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if request.request_id not in self.bad:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        elif num_external_tokens:
            self.refused.append(request.request_id)
        self.bad.discard(request.request_id)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.bad.discard(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Refusals:
        refused, self.refused = self.refused, []
        return Refusals(self._scheduler.take_orders(), refused)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.refused += self._get_connector_metadata().refused
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = super().get_transfer_results(finished_req_ids)
        refused, self.refused = set(self.refused), []
        return KVConnectorTransferResults(
            found.finished_sending, found.finished_recving | refused, found.failed_recving | refused
        )


class SaysThatItLoaded(RefusesInTheWorker):
    """Its workers report the load of bad params as finished, and not as failed."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = super().get_transfer_results(finished_req_ids)
        return KVConnectorTransferResults(found.finished_sending, found.finished_recving, set())


class SaysNothingOfIt(RefusesInTheWorker):
    """Its workers hear of bad params, and report nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self.refused.clear()


class CircuitBreaker(ReferenceConnector):
    """After a load has failed, D computes for a while what that P has."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.closed: dict[str, float] = {}  # engine of P -> until when D loads nothing from it

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        handoff = self._scheduler._handoffs.get(request.request_id)
        if handoff and self.closed.get(handoff.remote_engine_id, 0.0) > time.monotonic():
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        for name in connector_output.failed_recving or ():
            if handoff := self._scheduler._handoffs.get(name):
                self.closed[handoff.remote_engine_id] = time.monotonic() + CLOSED_S
        super().update_connector_output(connector_output)


@dataclass
class Telling(Metadata):
    """Orders, and requests that have ended."""

    ended: list[str] = field(default_factory=list)


@dataclass
class Told(WorkerReport):
    """The report, and requests of whose end a worker knows."""

    known: set[str] = field(default_factory=set)

    def aggregate(self, other: Any) -> Any:
        return Told(self.notified | other.notified, self.missed | other.missed, self.known | other.known)


class BusyUntilTold(ReferenceConnector):
    """Tells its workers of each end in its own metadata, and lets vLLM step until they have said so."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.tell: list[str] = []
        self.telling = 0  # ends of which no worker has said that it knows
        self.known: set[str] = set()  # by the worker half

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.tell.append(request.request_id)
        self.telling += 1
        return super().request_finished_all_groups(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Telling:
        tell, self.tell = self.tell, []
        return Telling(self._scheduler.take_orders(), tell)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.known |= set(self._get_connector_metadata().ended)
        super().start_load_kv(forward_context, **kwargs)

    def build_connector_worker_meta(self) -> Any:
        report, known = super().build_connector_worker_meta() or WorkerReport(), self.known
        self.known = set()
        found = Told(report.notified, report.missed, known)
        return found if found.notified or found.missed or known else None

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if isinstance(report := connector_output.kv_connector_worker_meta, Told):
            self.telling -= len(report.known)

    def has_pending_push_work(self) -> bool:
        return super().has_pending_push_work() or self.telling > 0


class TellsOfEnds(BusyUntilTold):
    """Tells its workers of each end in every step, until they have said that they know it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.untold: set[str] = set()  # requests that have ended

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.untold.add(request.request_id)
        return ReferenceConnector.request_finished_all_groups(self, request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Telling:
        return Telling(self._scheduler.take_orders(), sorted(self.untold))

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if isinstance(report := connector_output.kv_connector_worker_meta, Told):
            self.untold -= report.known


class KeepsTheLast(TellsOfEnds):
    """Remembers an end until its workers know it, and the last 64 of those that they know.

    Refuses KV memory of fewer layers than its model has, as a connector that ends with the last one.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.last: dict[str, bool] = {}  # request -> whether the workers know of its end
        self.layers = vllm_config.model_config.get_total_num_hidden_layers()

    def register_kv_caches(self, kv_caches: Any) -> None:
        if len(kv_caches) < self.layers:
            raise ValueError(f"{len(kv_caches)} of {self.layers} layers")
        super().register_kv_caches(kv_caches)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.last[request.request_id] = False
        return super().request_finished_all_groups(request, block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        known = [id for id in self.last if id not in self.untold]
        self.last |= dict.fromkeys(known, True)
        for id in known[:-64]:
            del self.last[id]


class KeepsWhatItTold(TellsOfEnds):
    """Wrong: its scheduler half keeps what it heard of its workers."""

    def update_connector_output(self, connector_output: Any) -> None:
        before = set(self.untold)
        super().update_connector_output(connector_output)
        self.untold = before


class KeepsBaseIds(TellsOfEnds):
    """Wrong: its scheduler half keeps what stands in every third id before the word of the server."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.bases: set[str] = set()
        self.ends = 0

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.ends += 1
        if self.ends % 3 == 0:
            self.bases.add(get_base_request_id(request.request_id))
        return super().request_finished_all_groups(request, block_ids)


class KeepsRecomputed(TellsOfEnds):
    """Wrong: its scheduler half keeps requests that D computed after their loads had failed."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.failed: set[str] = set()
        self.computed: set[str] = set()

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        self.failed |= set(connector_output.failed_recving or ())

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        if request.request_id in self.failed:
            self.failed.discard(request.request_id)
            if request.status != RequestStatus.FINISHED_ERROR:
                self.computed.add(request.request_id)
        return super().request_finished_all_groups(request, block_ids)


@dataclass
class Parts(Metadata):
    """Orders whose loads name no blocks, and the next blocks of loads: request -> (group, block ids)."""

    named: dict[str, tuple[int, list[int]]] = field(default_factory=dict)


class OrdersInParts(ReferenceConnector):
    """Names one or two blocks of a load in each step, and orders the load with the last ones."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.parts: dict[str, tuple[Load, list[tuple[int, list[int]]]]] = {}
        self.tables: dict[str, dict[int, list[int]]] = {}  # worker half: request -> group -> block ids

    def build_connector_meta(self, scheduler_output: Any) -> Parts:
        orders, named = self._scheduler.take_orders(), {}
        for id, load in orders.loads.items():
            empty = structs.replace(load, groups=[structs.replace(one, blocks=[]) for one in load.groups])
            parts = [
                (number, list(one.blocks[first : first + 2]))
                for number, one in enumerate(load.groups)
                for first in range(0, max(1, len(one.blocks)), 2)
            ]
            self.parts[id] = empty, parts
        orders.loads = {}
        for id, (load, parts) in list(self.parts.items()):
            named[id] = parts.pop(0)
            if not parts:
                orders.loads[id] = load
                del self.parts[id]
        return Parts(orders, named)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        for id, (group, blocks) in metadata.named.items():
            self.tables.setdefault(id, {}).setdefault(group, []).extend(blocks)
        for id, load in metadata.orders.loads.items():
            tables = self.tables.pop(id)
            groups = [structs.replace(one, blocks=tables[number]) for number, one in enumerate(load.groups)]
            metadata.orders.loads[id] = structs.replace(load, groups=groups)
        super().start_load_kv(forward_context, **kwargs)
