"""Right connectors of other designs than a pull between steps. Each names the connector that it is like."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.v1.kv_cache_interface import MambaSpec

from reference_connector import ReferenceConnector
from reference_connector.connector import Metadata, WorkerReport
from reference_connector.messages import Handoff, Load

from . import stores

WAIT_S = 20.0
LOAD_S = 150.0  # longer than transfer_timeout, after which the worker reports a load as failed


class Right(ReferenceConnector):
    """Nothing but ReferenceConnector."""


@dataclass
class Ended(WorkerReport):
    """What a worker reports of loads within a step: requests whose load has ended, well or not."""

    loads: set[str] = field(default_factory=set)

    def aggregate(self, other: Any) -> Ended:
        both = super().aggregate(other)
        return Ended(both.notified, both.missed, self.loads | other.loads)


@dataclass(frozen=True)
class Mine:
    """A block, and whether the request may write to it."""

    block_id: int
    is_null: bool
    block_hash: Any


@dataclass(frozen=True)
class Copy:
    """One state that belongs to two blocks."""

    group: int
    of: int
    to: int


@dataclass
class Copying(Metadata):
    copies: list[Copy]


class LayerWise(ReferenceConnector):
    """Loads within the step that reads them: begun in start_load_kv, waited for in wait_for_layer_load, as
    vLLM's MoRIIOConnector in mode read. No layer hook waits for a state, so that start_load_kv itself waits
    if the model has states.

    vLLM hashes the blocks of such a load before update_state_after_alloc, so that the local hit is known by
    its length alone. A state that ends with a block belongs to that block, for the prefix cache, and to the
    next one, which the step reads: vLLM copies states from block to block before start_load_kv
    (v1/worker/mamba_utils.py: preprocess_mamba). A failed load is reported by its blocks. vLLM takes that
    from models with one KV cache group only, so that the others read once more.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.states = [isinstance(spec, MambaSpec) for spec in specs]
        self.sizes = [spec.block_size for spec in specs]
        self.local: dict[str, int] = {}  # tokens of the local hit
        self.between: set[str] = set()  # loads that no step waits for
        self.copies: list[Copy] = []
        self.caches: dict[str, Any] = {}
        self.loads: dict[str, Load] = {}  # of this step
        self.again, self.ended = set[str](), set[str]()
        self.invalid: set[int] = set()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return False

    # ---- the scheduler half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.local[request.request_id] = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)[0], False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        local = self.local.pop(request.request_id, 0)
        tables = [
            [Mine(b.block_id, b.is_null, i * size < local or None) for i, b in enumerate(table)]
            for table, size in zip(blocks.blocks, self.sizes, strict=True)
        ]
        self._scheduler.update_state_after_alloc(request, self._transferred(tables), num_external_tokens)
        for group, (table, size) in enumerate(zip(blocks.blocks, self.sizes, strict=True)):
            whole, rest = divmod(local + num_external_tokens, size)
            if num_external_tokens and not rest and self.states[group] and len(table) > whole:
                self.copies.append(Copy(group, table[-1].block_id, table[whole - 1].block_id))

    def build_connector_meta(self, scheduler_output: Any) -> Copying:
        copies, self.copies = self.copies, []
        return Copying(self._scheduler.take_orders(), copies)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.local.pop(request.request_id, None)
        self._scheduler.on_loads_finished({request.request_id})  # no load outlives its step
        return super().request_finished_all_groups(request, block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if isinstance(report := connector_output.kv_connector_worker_meta, Ended):
            self._scheduler.on_loads_finished(report.loads)

    # ---- the worker half

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if isinstance(metadata := self._get_connector_metadata(), Copying):
            self.loads = metadata.orders.loads
        super().start_load_kv(forward_context, **kwargs)
        if any(self.states):
            self.wait_for_layer_load("")
        for copy in metadata.copies if isinstance(metadata, Copying) else ():
            for name in self._kv_cache_config.kv_cache_groups[copy.group].layer_names:
                found = self.caches[name]
                for cache in found if isinstance(found, list | tuple) else [found]:
                    cache[copy.to] = cache[copy.of]

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.caches = kv_caches

    def wait_for_layer_load(self, layer_name: str) -> None:
        worker, deadline = self._worker, time.monotonic() + LOAD_S
        while worker._loads.keys() - self.between or worker._results.failed - self.between:
            if time.monotonic() > deadline:  # the step must not read what is not there
                raise TimeoutError(f"loads have not ended: {sorted(worker._loads)}")
            worker.advance()
            for name in worker._results.failed - self.between:
                worker._results.failed.discard(name)
                if len(self.sizes) > 1 and name not in self.again:
                    worker._results.received.discard(name)
                    worker._loads[name] = worker._load(self.loads[name])
                    self.again.add(name)
                else:
                    self.invalid |= {block for group in self.loads[name].groups for block in group.blocks} - {
                        0
                    }

    def wait_for_save(self) -> None:
        self.wait_for_layer_load("")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        self.ended |= results.finished_recving
        self.again -= results.finished_recving
        return KVConnectorTransferResults(results.finished_sending, set(), set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self.invalid = self.invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> Ended | None:
        report: Any = super().build_connector_worker_meta() or WorkerReport()
        ended, self.ended = self.ended, set()
        found = Ended(report.notified, report.missed, ended)
        return found if report.notified or report.missed or ended else None


class Rendezvous(ReferenceConnector):
    """P and D get one transfer id from the router, D perhaps first. D finds out where P's KV lies by this id,
    as vLLM's MooncakeConnector: here in a folder that both share, in place of a bootstrap server.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.folder = Path(tempfile.gettempdir()) / "rendezvous"
        self.folder.mkdir(exist_ok=True)
        self.open: dict[str, tuple[str, float]] = {}  # D's requests that P has not answered -> id, deadline

    def answer(self, transfer: str) -> Any:
        """What P has published; None: nothing yet."""
        try:
            return json.loads((self.folder / transfer).read_text())
        except FileNotFoundError:
            return None

    def publish(self, transfer: str, answer: Any) -> None:
        new = self.folder / f".{transfer}-{os.getpid()}"
        new.write_text(json.dumps(answer))
        new.rename(self.folder / transfer)

    def on_new_request(self, request: Any) -> None:
        transfer = _transfer(request, "do_remote_prefill")
        if transfer:
            self.open[request.request_id] = transfer, time.monotonic() + WAIT_S
        else:
            super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        name = request.request_id
        if name in self.open:
            transfer, deadline = self.open[name]
            if self.answer(transfer) is None and time.monotonic() < deadline:
                return None, False
            self.meet(transfer)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def meet(self, transfer: str) -> None:
        """Let all requests with this id know what P has published."""
        for name in [name for name, (other, _) in self.open.items() if other == transfer]:
            del self.open[name]
            if handoff := Handoff.read(self.answer(transfer)):
                self._scheduler.hold(name, handoff)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for transfer in {transfer for transfer, _ in self.open.values()}:
            if self.answer(transfer) is not None:
                self.meet(transfer)  # from now on the lease is renewed
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        if request.request_id in self.open:
            transfer, _ = self.open[request.request_id]
            if self.answer(transfer) is None:
                self.publish(transfer, {})  # P need not keep anything
            self.meet(transfer)
        transfer = _transfer(request, "do_remote_decode")
        if transfer and self.answer(transfer) is not None:
            return False, None  # D has given up
        keep, params = super().request_finished_all_groups(request, block_ids)
        if transfer:
            self.publish(transfer, params or {})
        return keep, None


class ByRoom(Rendezvous):
    """Its proxy tells P and D the name of a room, in words of its own: `proxies.by_room`."""

    def seen(self, request: Any) -> Any:
        """The request in the words of `Rendezvous`."""
        return InTheRoom(request)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(self.seen(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return super().get_num_new_matched_tokens(self.seen(request), num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(self.seen(request), blocks, num_external_tokens)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return super().request_finished_all_groups(self.seen(request), block_ids)


class InTheRoom:
    """A request whose params are in the words of `Rendezvous`. What is written to it reaches the request."""

    def __init__(self, request: Any):
        params, words = request.kv_transfer_params, None
        if isinstance(params, dict) and params.get("part") in ("gives", "takes"):
            key = "do_remote_decode" if params["part"] == "gives" else "do_remote_prefill"
            words = {key: True, "transfer_id": params.get("room")}
        vars(self).update(_request=request, kv_transfer_params=words)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._request, name, value)  # a prefill is shortened in place


def _transfer(request: Any, side: str) -> str:
    """The id under which P and D meet; "" if the params are not those of this side."""
    params = request.kv_transfer_params
    if not isinstance(params, dict) or not params.get(side):
        return ""
    if params.get("do_remote_decode") and params.get("do_remote_prefill"):
        return ""
    transfer = params.get("transfer_id")
    return transfer if isinstance(transfer, str) and re.fullmatch(r"[\w-]{1,64}", transfer) else ""


@dataclass
class AndSaves(Metadata):
    own: stores.Orders = field(default_factory=stores.Orders)


class OwnCache(ReferenceConnector):
    """Loads what P hands over, and what the engine has lost from a memory of its own, for one cache group."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise NotImplementedError("its cache is for one KV cache group")
        super().__init__(vllm_config, role, kv_cache_config)
        self.store, self.own = stores.InMemory(vllm_config, role, kv_cache_config), set[str]()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        own = self.store.get_num_new_matched_tokens(request, num_computed_tokens)
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        handed_over = answer[0] or request.request_id in self._scheduler._loading
        loads = own[0] and not handed_over and not request.get_skip_reading_prefix_cache()
        (self.own.add if loads else self.own.discard)(request.request_id)
        return own if loads else answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        own = num_external_tokens if request.request_id in self.own else 0
        super().update_state_after_alloc(request, blocks, num_external_tokens - own)
        self.store.update_state_after_alloc(request, blocks, own)

    def build_connector_meta(self, scheduler_output: Any) -> AndSaves:
        return AndSaves(self._scheduler.take_orders(), self.store.build_connector_meta(scheduler_output))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.own.discard(request.request_id)
        self.store.request_finished(request, block_ids[0])
        return super().request_finished_all_groups(request, block_ids)

    def reset_cache(self) -> bool:
        return self.store.reset_cache()

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self.store.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.store.load([one for parts in self._get_connector_metadata().own.loads.values() for one in parts])
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        self.store.save([one for parts in self._get_connector_metadata().own.saves.values() for one in parts])
