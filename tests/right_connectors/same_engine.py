"""A right store that keeps blocks in the memory of its own process: only the engine that has saved loads."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.right_connectors.stores import CAPACITY, Orders, Part, WholeBlocks


class InMemory(WholeBlocks):
    """Copies each whole block to the memory of its process, and loads it from there when the engine has lost
    it: as SimpleCPUOffloadConnector. Each half forgets the oldest blocks, both in the same order.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.saved: dict[str, None] = {}  # scheduler half: keys, the oldest first
        self.kept: dict[str, dict[str, torch.Tensor]] = {}  # worker half: key -> rows by layer, likewise

    # ---- scheduler half ------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        return key in self.saved

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        for parts in orders.saves.values():
            for key, _ in parts:
                remember(self.saved, key, None)
        return orders

    def reset_cache(self) -> bool:
        self.saved.clear()
        return True

    # ---- worker half ---------------------------------------------------------------------------------------

    def save(self, parts: list[Part]) -> None:
        for key, block in parts:
            rows = {name: self.rows(cache, block).clone() for name, cache in self.caches.items()}
            remember(self.kept, key, rows)

    def load(self, parts: list[Part]) -> None:
        for key, block in parts:
            for name, rows in self.kept[key].items():
                self.rows(self.caches[name], block).copy_(rows)


def remember(kept: dict[str, Any], key: str, value: Any) -> None:
    """Keep a value as the newest one, and no more than CAPACITY of them."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > CAPACITY:
        del kept[next(iter(kept))]
