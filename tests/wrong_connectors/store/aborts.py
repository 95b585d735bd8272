"""A right store that loads between steps in one engine, and stores with a mistake about aborts."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch

from tests.right_connectors.stores import InMemory, LooksUpInTheBackground, Part, WholeBlocks

UNIT = 16  # tokens of a file of Latents


class InMemoryBetweenSteps(LooksUpInTheBackground, InMemory):
    """No mistake: it has what it saves in the memory of its process, and loads it in a thread."""


class TakesAWhile(LooksUpInTheBackground):
    """No mistake: a load is under way for some steps."""

    def load(self, parts: list[Part]) -> None:
        time.sleep(0.2)
        super().load(parts)


class ForgetsAbortedLoads(TakesAWhile):
    """Reports no load of a request that has ended meanwhile, so that vLLM keeps its blocks."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for id in finished_req_ids:
            self.loading.pop(id, None)
        return super().get_finished(finished_req_ids)


class ForgetsAbortedLoadsInMemory(ForgetsAbortedLoads, InMemoryBetweenSteps):
    """The same, in one engine."""


class AbortsTheOthers(TakesAWhile):
    """Reports no load that was under way when a request ended that was loading."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if finished_req_ids & self.loading.keys():
            self.loading = {id: one for id, one in self.loading.items() if id in finished_req_ids}
        return super().get_finished(finished_req_ids)


class ExpectsBlocks(WholeBlocks):
    """Takes for granted that a request which ends has been scheduled."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        del self.tables[request.request_id]
        return super().request_finished(request, block_ids)


class Latents(WholeBlocks):
    """No mistake: a store for models with latent attention, of which every rank has the same rows. Its files
    hold UNIT tokens, so that engines with other numbers of ranks and other sizes of blocks find them.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.ranks, self.rank = 1, 0
        self.prefix = hashlib.sha256(vllm_config.model_config.model.encode()).hexdigest()[:16]

    def keys(self, request: Any) -> list[str]:
        """The key of a block: those of its units."""
        tokens, salt = list(request.all_token_ids), request.cache_salt
        ends = range(UNIT, len(tokens) // self.size * self.size + 1, UNIT)
        hashes = (hashlib.sha256(repr((salt, tokens[:end])).encode()) for end in ends)
        units, each = [f"{self.prefix}-{one.hexdigest()}" for one in hashes], self.size // UNIT
        return [",".join(units[first : first + each]) for first in range(0, len(units), each)]

    def has(self, key: str) -> bool:
        return all(map(super().has, key.split(",")))

    def units(self, parts: list[Part]) -> list[Part]:
        """Each unit of these blocks, with its number among those of all blocks."""
        return [
            (unit, block * (self.size // UNIT) + number)
            for key, block in parts
            for number, unit in enumerate(key.split(","))
        ]

    def rows(self, cache: torch.Tensor, unit: int) -> torch.Tensor:
        return cache.view(-1, UNIT, cache.shape[-1])[unit]

    def load(self, parts: list[Part]) -> None:
        super().load(self.units(parts))

    def save(self, parts: list[Part]) -> None:
        super().save(self.units(parts))
