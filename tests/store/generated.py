"""Stores that save blocks which decoding fills: right ones, and ones that save too early or too much."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.right_connectors.stores import Orders, Part, WholeBlocks


class Right(WholeBlocks):
    """No mistake: saves each block after the step that fills it, also a block of sampled tokens."""


@dataclass
class EarlyOrders(Orders):
    """What a step saves before its forward, too."""

    early: list[Part] = field(default_factory=list)


class SavesBeforeTheForward(WholeBlocks):
    """Saves a block that a sampled token fills before the forward that computes the KV of this token."""

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders = EarlyOrders(**vars(super().build_connector_meta(scheduler_output)))
        cached = scheduler_output.scheduled_cached_reqs
        for id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if computed >= self.requests[id].num_prompt_tokens:
                orders.early += orders.saves.pop(id, [])
        return orders

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self.save(kv_connector_metadata.early)


class OneKeyForAll(WholeBlocks):
    """The key of a block is its place in the prompt, whatever the tokens are."""

    def keys(self, request: Any) -> list[str]:
        return [str(place) for place, _ in enumerate(super().keys(request))]


class SavesWithTheLoads(SavesBeforeTheForward):
    """Saves it in start_load_kv: before the forward if another request of the step loads synchronously."""

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        pass

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EarlyOrders)
        self.save(metadata.early)


class SavesTheLastToken(WholeBlocks):
    """Saves at the end of a request as many blocks as it has hashes: they count the last sampled token."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.ended: dict[str, list[tuple[str, int]]] = {}

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        orders.saves |= self.ended
        self.ended = {}
        return orders

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        parts = list(zip(self.keys(request), block_ids, strict=False))
        if new := [(key, block) for key, block in parts if not self.has(key)]:
            self.ended[request.request_id] = new
        super().request_finished(request, block_ids)
        return False, None
