"""Wrong loads behind a prefix hit, and wrong ends of aborted requests."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import MambaSpec

from .right import Answer, Ended, Right, handed_over


class SilentWithoutALoad(Right):
    """Has nothing to load, and so nothing to say."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if handed_over(request) and not num_external_tokens:
            request.kv_transfer_params["do_remote_prefill"] = False
            return
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class ForgetsTheBackoff(Right):
    """Loads the last token, too, where D has some already: P leaves it to D."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (
            request.num_tokens - num_computed_tokens if num_computed_tokens and count else count
        ), is_async


class LeavesStatesOut(Right):
    """Loads no state where D has blocks of attention."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.request_id not in self.half._reqs_need_recv:
            return
        request, ids, counts, waits = self.half._reqs_need_recv[request.request_id]
        if any(counts) and ids:
            specs = [group.kv_cache_spec for group in self._kv_cache_config.kv_cache_groups]
            ids = tuple(
                [] if isinstance(spec, MambaSpec) else list(group)
                for spec, group in zip(specs, ids, strict=True)
            )
            self.half._reqs_need_recv[request.request_id] = request, ids, counts, waits


class OrdersStatesLater(Right):
    """No mistake: orders the states of a load in the step after the one that orders its attention blocks."""

    later: dict[str, Any]  # request -> what of its order is due in the next step

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        specs = [group.kv_cache_spec for group in self._kv_cache_config.kv_cache_groups]
        orders, due, self.later = self.half._reqs_need_recv, getattr(self, "later", {}), {}
        for name, (request, ids, counts, waits) in list(orders.items()):
            if any(ids):
                of_states, others = (
                    tuple(
                        list(group) if isinstance(spec, MambaSpec) == wanted else []
                        for spec, group in zip(specs, ids, strict=True)
                    )
                    for wanted in (True, False)
                )
                orders[name] = request, others, counts, waits
                self.later[name] = request, of_states, counts, waits
        orders.update({name: order for name, order in due.items() if not order[0].is_finished()})
        return super().build_connector_meta(scheduler_output)


class LoadsTheLastToken(Right):
    """D does not know that P stops before the last token."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (request.num_tokens - num_computed_tokens, is_async) if count else (count, is_async)


class KeepsWhatLoads(Right):
    """Keeps the blocks of a request that is aborted while it loads, a second time."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        keeps, params = super().request_finished_all_groups(request, block_ids)
        loaded = (request.kv_transfer_params or {}).get("_remote_blocks_processed")
        return keeps or bool(loaded and request.status.name == "FINISHED_ABORTED"), params


class KeepsWhatLoadsBesideATensor(KeepsWhatLoads):
    """The same, and its metadata has a tensor, too."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        meta.slots = torch.zeros(3)
        return meta


class ForgetsTheOthers(Right):
    """Announces nothing to the next request when one was aborted."""

    dropping = False

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self.dropping = request.status.name == "FINISHED_ABORTED"
        return super().request_finished_all_groups(request, block_ids)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        if self.dropping and handed_over(request):
            self.dropping, request.kv_transfer_params = False, None
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class WaitsForItsTwin(Right):
    """Answers None for a request whose params another one loads with, until a load of a request that it knows
    is reported: the second one then hits D's prefix cache.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.loading: dict[str, str] = {}  # request -> the one of P whose KV it loads
        self.ended: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        first = (request.kv_transfer_params or {}).get("remote_request_id")
        others = {of for name, of in self.loading.items() if name != request.request_id}
        if handed_over(request) and first in others:
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loading[request.request_id] = request.kv_transfer_params["remote_request_id"]
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        for name in connector_output.finished_recving or ():
            if name not in self.ended:
                self.loading.pop(name, None)
        super().update_connector_output(connector_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self.ended.add(request.request_id)
        return super().request_finished_all_groups(request, block_ids)


class LetsItsTwinGo(WaitsForItsTwin):
    """Right: a load that is aborted keeps nobody waiting."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self.loading.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)
