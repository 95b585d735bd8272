"""Stores of blocks that decoding fills, or that are announced while they are saved: right and wrong ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.right_connectors.stores import Orders, Part, WholeBlocks, WritesBehind


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


class AnnouncesWhatItIsSaving(WritesBehind):
    """Has a block in its index once the save is ordered. A worker that does not find the block loads none."""

    def index(self, key: str) -> Path:
        return self.folder / f"{key}.ordered"

    def has(self, key: str) -> bool:
        return self.index(key).exists()

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        for parts in orders.saves.values():
            for key, _ in parts:
                self.index(key).touch()
        return orders

    def load(self, parts: list[Part]) -> None:
        super().load([part for part in parts if self.file(part[0], self.rank).exists()])


class WritesInPlace(WholeBlocks):
    """A file has its name before all layers are in it: the other half of them comes a step later."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.begun: list[tuple[str, dict[str, torch.Tensor]]] = []

    def save(self, parts: list[Part]) -> None:
        for key, block in parts:
            whole = {name: self.rows(cache, block).clone() for name, cache in self.caches.items()}
            half = {name: whole[name] for name in list(whole)[: len(whole) // 2]}
            torch.save(half, self.file(key, self.rank))
            self.begun.append((key, whole))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        begun, self.begun = self.begun, []
        for key, whole in begun:
            torch.save(whole, self.file(key, self.rank))
