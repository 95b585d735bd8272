"""Stores that load in the engine alone that has saved, with one mistake each."""

from __future__ import annotations

import hashlib
from typing import Any

from tests.right_connectors.stores import LATER, InMemory, Orders, Part


class Right(InMemory):
    """No mistake."""


class LoadsAnother(InMemory):
    """Loads what was saved last, whatever was asked for."""

    def load(self, parts: list[Part]) -> None:
        last = list(self.kept)[-len(parts) :]
        super().load([(key, block) for key, (_, block) in zip(last, parts, strict=True)])


class LosesLastBlock(InMemory):
    """Saves all blocks of a step but the last one, which it announces."""

    def save(self, parts: list[Part]) -> None:
        super().save(parts[:-1])

    def load(self, parts: list[Part]) -> None:
        super().load([part for part in parts if part[0] in self.kept])


class SavesTooLate(InMemory):
    """Saves some steps later, and lets vLLM give the blocks to other requests meanwhile."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.later: list[tuple[int, list[Part]]] = []
        self.step = 0

    def wait_for_save(self) -> None:
        self.step += 1
        self.later += [(self.step + LATER, parts) for parts in self._get_connector_metadata().saves.values()]
        for step, parts in self.later:
            if step <= self.step:
                self.save(parts)
        self.later = [later for later in self.later if later[0] > self.step]

    def load(self, parts: list[Part]) -> None:
        super().load([part for part in parts if part[0] in self.kept])


class IgnoresSalt(InMemory):
    """The key of a block depends on the tokens up to its end, and on nothing else."""

    def keys(self, request: Any) -> list[str]:
        tokens = request.all_token_ids
        ends = range(self.size, len(tokens) + 1, self.size)
        return [hashlib.sha256(repr(list(tokens[:end])).encode()).hexdigest() for end in ends]


class KeepsBlocks(InMemory):
    """Says that it still saves blocks of a request that has ended, and never that it has saved them."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        return True, None


class NeverSaves(InMemory):
    """Finds nothing again."""

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        self.saved.clear()
        return orders


class LosesAReport(InMemory):
    """Announces loads between steps, and never reports that one has ended."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found, bool(found)
