"""A D that waits for what its workers have fetched to host memory, before it announces anything."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from ..sockets import GONE, Load, ask, connect, receive
from .pulls import CarefulPull

Params = dict[str, Any]


@dataclass
class Fetch(Load):
    """A copy of P's blocks in host memory, layer by layer."""

    copy: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Steps(KVConnectorMetadata):
    """What workers do from this step on. `fetch`: request -> params. `place`: request -> (blocks of D, the
    first of the copy). `forget`: requests whose copies are of no more use. `sends`, `releases`: of `TcpPull`.
    """

    fetch: dict[str, Params] = field(default_factory=dict)
    place: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    forget: list[str] = field(default_factory=list)
    sends: dict[str, list[int]] = field(default_factory=dict)
    releases: list[Params] = field(default_factory=list)


@dataclass
class Arrived(KVConnectorWorkerMetadata):
    """Request -> whether its copy is there, or will not come."""

    copies: dict[str, bool]

    def aggregate(self, other: Any) -> Any:
        raise NotImplementedError("there is one rank")


class Prefetches(CarefulPull):
    """As soon as D has a request, before it has a block, D's worker fetches what P hands over to host memory,
    and tells P that it may free the blocks. get_num_new_matched_tokens answers None until the worker has said
    in metadata of its own that the copy is there. Then the load is synchronous: start_load_kv puts the copy
    into the blocks. The copy stays until the request ends, for a load after a preemption.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.orders: Any = Steps()
        self.there: dict[str, bool | None] = {}  # request of D -> whether its copy is; None: not known yet
        self.under_way: set[str] = set()  # these three: of the worker half
        self.copies: dict[str, dict[int, torch.Tensor]] = {}
        self.arrived: dict[str, bool] = {}

    # ---- the scheduler half

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if (params := self.wanted.pop(request.request_id, None)) is not None:
            self.there[request.request_id] = None
            self.orders.fetch[request.request_id] = params

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[Any, bool]:
        there = self.there.get(request.request_id, False)
        if there is None:
            return None, False
        # the step that loads computes a token, too
        return max(0, request.num_prompt_tokens - 1 - num_computed_tokens) if there else 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (table,) = blocks.get_block_ids()
            stop = request.num_prompt_tokens - 1
            first, end = (stop - num_external_tokens) // self.block_size, -(-stop // self.block_size)
            self.orders.place[request.request_id] = table[first:end], first

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders, self.orders = self.orders, Steps()
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(said := connector_output.kv_connector_worker_meta, Arrived):
            for request in said.copies.keys() & self.there.keys():
                self.there[request] = said.copies[request]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, Params | None]:
        name = request.request_id
        if self.there.pop(name, False) is not False:
            if name in self.orders.fetch:  # the worker has not heard of it
                self.orders.releases.append(self.orders.fetch.pop(name))
            else:
                self.orders.forget.append(name)
        return super().request_finished_all_groups(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return bool(self.orders.forget or self.orders.releases)

    # ---- the worker half

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        steps = self._get_connector_metadata()
        end = time.monotonic() + self.lease_s
        self.leases |= {request: (blocks, end) for request, blocks in steps.sends.items()}
        for params in steps.releases:
            self.jobs.put(lambda params=params: self.tell(params))
        for request, params in steps.fetch.items():
            self.under_way.add(request)
            self.begin(Fetch(request, params, [], params["remote_block_ids"]))
        for request, (blocks, first) in steps.place.items():
            self.put(request, blocks, first)
        for request in steps.forget:
            self.under_way.discard(request)
            self.copies.pop(request, None)
            self.arrived.pop(request, None)

    def put(self, request: str, blocks: list[int], first: int) -> None:
        """Put a copy into D's blocks, from its block number `first` on."""
        for layer, cache in enumerate(self.caches):
            cache[blocks] = self.copies[request][layer][first : first + len(blocks)]

    def begin(self, load: Load) -> None:
        what, steps = self.fault_of_next()
        load.open, load.dropped = 1, what == "drop"

        def job() -> None:
            right = what != "fail" and self.fetch(load, range(len(self.caches)))
            if not load.dropped:  # now: an engine without requests takes no further step
                self.tell(load.params)
            self.ends.put((load, right))

        if what == "delay" and steps:
            self.delayed.append((steps, job))
        else:
            self.jobs.put(job)

    def read(self, load: Load, layers: range) -> bool:
        assert isinstance(load, Fetch)
        with connect(load.params) as peer, self.until_closed(peer):
            ask(peer, request=load.params["remote_request_id"], blocks=load.remote, layers=list(layers))
            for layer in layers:
                rows = torch.empty_like(self.caches[layer][: len(load.remote)]).contiguous()
                data = torch.frombuffer(bytearray(receive(peer, rows.nbytes)), dtype=torch.uint8)
                load.copy[layer] = data.view(rows.dtype).reshape(rows.shape)
            return receive(peer, len(GONE)) != GONE

    def report(self, found: KVConnectorTransferResults, load: Load) -> None:
        if load.request in self.under_way:
            self.under_way.discard(load.request)
            self.arrived[load.request] = not load.failed
            if isinstance(load, Fetch) and not load.failed:
                self.copies[load.request] = load.copy

    def build_connector_worker_meta(self) -> Arrived | None:
        arrived, self.arrived = self.arrived, {}
        return Arrived(arrived) if arrived else None


class AnswersTooSoon(Prefetches):
    """Wrong: D announces what its worker has not fetched yet, and then loads what is there of it: nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[Any, bool]:
        if self.there.get(request.request_id, False) is None:
            self.there[request.request_id] = True
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def put(self, request: str, blocks: list[int], first: int) -> None:
        if request in self.copies:
            super().put(request, blocks, first)


class NeverSaysSo(Prefetches):
    """Wrong: D's worker says nothing of a copy that has come."""

    def build_connector_worker_meta(self) -> Arrived | None:
        self.arrived = {request: there for request, there in self.arrived.items() if not there}
        return super().build_connector_worker_meta()


class KeepsItsOrders(Prefetches):
    """Wrong: D's scheduler half remembers every request whose copy has come."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.loaded: list[str] = []

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if isinstance(said := connector_output.kv_connector_worker_meta, Arrived):
            self.loaded += [request for request, there in said.copies.items() if there]
