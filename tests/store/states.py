"""A right store for models with states, and stores with one mistake each.

Engines import this module by its name: it lies in a folder of PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import MambaSpec

Tables = tuple[list[int], ...]  # block ids of each KV cache group


@dataclass
class Part:
    """Tokens [first, end) of a request, whole blocks of its prompt."""

    key: str
    tables: Tables
    first: int
    end: int


@dataclass
class Orders(KVConnectorMetadata):
    """What the workers do in a step."""

    loads: dict[str, Part] = field(default_factory=dict)  # by request
    saves: list[Part] = field(default_factory=list)


class WithStates(KVConnectorBase_V1, SupportsHMA):
    """Saves a prompt up to each end of a block at which a step stops: only there vLLM has the state. Loads
    between two steps, as MooncakeStoreConnector with load_async: within a step vLLM has copied states before.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self.folder = Path(self._kv_transfer_config.get_from_extra_config("shared_storage_path", ""))
        self.rank, self.ranks = parallel.rank, parallel.tensor_parallel_size
        self.groups = kv_cache_config.kv_cache_groups
        states = (group for group in self.groups if isinstance(group.kv_cache_spec, MambaSpec))
        self.states = [name for group in states for name in group.layer_names]
        self.size, self.blocks = vllm_config.cache_config.block_size, kv_cache_config.num_blocks
        self.requests: dict[str, Any] = {}
        self.tables: dict[str, Tables] = {}
        self.local: dict[str, int] = {}  # request -> tokens that the engine has itself
        self.loads: dict[str, Part] = {}
        self.loaded: set[str] = set()  # worker half

    # ---- scheduler half ------------------------------------------------------------------------------------

    def key(self, request: Any, end: int) -> str:
        text = repr((request.cache_salt, request.all_token_ids[:end], self.ranks, self.size))
        return hashlib.sha256(text.encode()).hexdigest()

    def file(self, key: str, rank: int) -> Path:
        return self.folder / f"{key}.{rank}"

    def found(self, request: Any) -> int:
        """Tokens of the prompt that are saved."""
        ends = range((request.num_prompt_tokens - 1) // self.size * self.size, 0, -self.size)
        saved = (
            all(self.file(self.key(request, end), rank).exists() for rank in range(self.ranks))
            for end in ends
        )
        return next((end for end, is_saved in zip(ends, saved, strict=True) if is_saved), 0)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.requests[request.request_id] = request
        self.local[request.request_id] = num_computed_tokens
        tokens = max(0, self.found(request) - num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            end = self.local[request.request_id] + num_external_tokens
            part = Part(self.key(request, end), blocks.get_block_ids(), self.local[request.request_id], end)
            self.loads[request.request_id] = part

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders, cached = Orders(loads=self.loads), scheduler_output.scheduled_cached_reqs
        self.loads = {}
        steps = []
        for new in scheduler_output.scheduled_new_reqs:
            self.tables[new.req_id] = tuple(list(ids) for ids in new.block_ids)
            steps.append((new.req_id, new.num_computed_tokens))
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if name in cached.resumed_req_ids:
                self.tables[name] = tuple(list(ids) for ids in blocks)
            elif blocks:
                for table, more in zip(self.tables[name], blocks, strict=True):
                    table.extend(more)
            steps.append((name, computed))
        for name, computed in steps:
            request, end = self.requests[name], computed + scheduler_output.num_scheduled_tokens[name]
            if end <= request.num_prompt_tokens and not end % self.size:
                tables = tuple(list(table) for table in self.tables[name])
                orders.saves.append(Part(self.key(request, end), tables, 0, end))
        return orders

    def request_finished_all_groups(self, request: Any, block_ids: Tables) -> tuple[bool, None]:
        for of_requests in (self.requests, self.tables, self.local, self.loads):
            of_requests.pop(request.request_id, None)
        return False, None

    # ---- worker half ---------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def places(self, part: Part) -> dict[str, list[torch.Tensor]]:
        """Layer -> the memory of the tokens of a part: each block, or the state after the last one."""
        found: dict[str, list[torch.Tensor]] = {}
        for group, table in zip(self.groups, part.tables, strict=True):
            for name in group.layer_names:
                ids = table[part.first // self.size : part.end // self.size]
                if name in self.states:
                    ids = self.slots(table, part.end)
                ratio = self.caches[name].shape[0] // self.blocks  # kernels may count smaller blocks
                found[name] = [self.caches[name][id * ratio : (id + 1) * ratio] for id in ids]
        return found

    def slots(self, table: list[int], end: int) -> list[int]:
        """The block that holds the state: those before it are the null block."""
        return [table[end // self.size - 1]]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, part in self._get_connector_metadata().loads.items():
            saved = torch.load(self.file(part.key, self.rank))
            for layer, places in self.places(part).items():
                for place, content in zip(places, self.chosen(saved, layer, len(places)), strict=True):
                    place.copy_(content)
            self.loaded.add(name)

    def chosen(self, saved: dict[str, list[torch.Tensor]], layer: str, places: int) -> list[torch.Tensor]:
        """What is loaded of a layer: the last blocks."""
        return saved[layer][-places:] if places else []

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loaded, self.loaded = self.loaded, set()
        return None, loaded or None

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for part in self._get_connector_metadata().saves:
            if not (file := self.file(part.key, self.rank)).exists():
                written = file.with_suffix(f".{self.rank}-{os.getpid()}")
                torch.save(
                    {name: [one.clone() for one in places] for name, places in self.places(part).items()},
                    written,
                )
                written.replace(file)


class ForgetsTheState(WithStates):
    """Loads attention alone: the slot of the state stays as it is."""

    def places(self, part: Part) -> dict[str, list[torch.Tensor]]:
        loads = self._get_connector_metadata().loads.values()
        return {
            name: places
            for name, places in super().places(part).items()
            if part not in loads or name not in self.states
        }


class FirstSlot(WithStates):
    """Loads a state into the first slot of the request, as if it had one only."""

    def slots(self, table: list[int], end: int) -> list[int]:
        return table[:1] if self._get_connector_metadata().loads else super().slots(table, end)


class CopiesEveryBlock(WithStates):
    """Saves and loads the blocks of states as those of attention, the null block among them."""

    def slots(self, table: list[int], end: int) -> list[int]:
        return table[: end // self.size]


class NextLayer(WithStates):
    """Loads the states of each layer into the next one."""

    def chosen(self, saved: dict[str, list[torch.Tensor]], layer: str, places: int) -> list[torch.Tensor]:
        other = self.states[self.states.index(layer) - 1] if layer in self.states else layer
        return super().chosen(saved, other, places)
