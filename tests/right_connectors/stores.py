"""Right stores of designs that exist. Each says which connector it is like.

All but the last keep one file for each block and rank, in a folder that engines share. The key of a block is
vLLM's own block hash, with model, dtype, block size and tensor parallel size. They are for models of one KV
cache group.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

Part = tuple[str, int]  # key of a block, and the block id
LATER = 3  # steps after which a save that is written behind is made
CAPACITY, MEMORY = 64, 512  # blocks of a store in a folder, and of one in memory


@dataclass
class Orders(KVConnectorMetadata):
    """What the workers do in a step."""

    loads: dict[str, list[Part]] = field(default_factory=dict)  # by request
    saves: dict[str, list[Part]] = field(default_factory=dict)
    flush: bool = False  # blocks of a save may be overwritten in this step


class WholeBlocks(KVConnectorBase_V1):
    """Saves each whole block once, whoever computes it, when the step that fills it is over; loads before the
    forward: as MooncakeStoreConnector with load_async off.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        model, cache = vllm_config.model_config, vllm_config.cache_config
        parallel = vllm_config.parallel_config
        self.size, self.ranks, self.rank = cache.block_size, parallel.tensor_parallel_size, parallel.rank
        speculative = vllm_config.speculative_config
        self.drafts = speculative is not None and speculative.use_eagle()
        folder = self._kv_transfer_config.get_from_extra_config("shared_storage_path", "")
        self.folder = Path(folder or tempfile.gettempdir()) / "blocks"
        shape = (model.model, str(model.dtype), cache.cache_dtype, self.size, self.ranks)
        self.prefix = hashlib.sha256(repr(shape).encode()).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.blocks = kv_cache_config.num_blocks
        self.requests: dict[str, Any] = {}
        self.tables: dict[str, list[int]] = {}
        self.done: dict[str, int] = {}  # request -> blocks that are saved, loaded or ordered
        self.local: dict[str, int] = {}  # request -> tokens that the engine has itself
        self.loads: dict[str, list[Part]] = {}

    # ---- scheduler half ------------------------------------------------------------------------------------

    def keys(self, request: Any) -> list[str]:
        """The keys of the whole blocks of a request.

        With an Eagle draft a key has the token after the block, too: the draft's row of a token depends on
        the next one. vLLM's block hash does not cover it, and a block before an unknown token has no key.
        """
        keys, tokens = [f"{self.prefix}-{key.hex()}" for key in request.block_hashes], request.all_token_ids
        if not self.drafts:
            return keys
        ends = range(self.size, len(tokens), self.size)
        return [f"{key}-{tokens[end]}" for key, end in zip(keys, ends, strict=False)]

    def has(self, key: str) -> bool:
        return all(self.file(key, rank).exists() for rank in range(self.ranks))

    def found(self, keys: list[str]) -> int:
        """Blocks at the beginning that are saved."""
        return next((index for index, key in enumerate(keys) if not self.has(key)), len(keys))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.local[request.request_id] = num_computed_tokens
        keys = self.keys(request)[: (request.num_tokens - 1) // self.size]
        return max(0, self.found(keys) * self.size - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.requests[request.request_id] = request
        if num_external_tokens:
            table, keys = blocks.get_block_ids()[0], self.keys(request)
            first = self.local[request.request_id] // self.size
            parts = range(first, first + num_external_tokens // self.size)
            self.loads[request.request_id] = [(keys[index], table[index]) for index in parts]

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders = Orders(loads=self.loads, flush=bool(scheduler_output.preempted_req_ids))
        self.loads = {}
        cached = scheduler_output.scheduled_cached_reqs
        steps = [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
        for new in scheduler_output.scheduled_new_reqs:
            self.tables[new.req_id], self.done[new.req_id] = list(new.block_ids[0]), 0
        for id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if id in cached.resumed_req_ids:
                self.tables[id], self.done[id] = [], 0
            self.tables[id] += blocks[0] if blocks else []
            steps.append((id, computed))
        for id, computed in steps:
            keys = self.keys(self.requests[id])
            end = min((computed + scheduler_output.num_scheduled_tokens[id]) // self.size, len(keys))
            if parts := [
                (keys[index], self.tables[id][index])
                for index in range(self.done[id], end)
                if not self.has(keys[index])
            ]:
                orders.saves[id] = parts
            self.done[id] = max(end, self.done[id])
        return orders

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        for of_requests in (self.requests, self.tables, self.done, self.local, self.loads):
            of_requests.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool | None:
        for file in self.folder.glob(f"{self.prefix}-*"):
            file.unlink(missing_ok=True)
        return True

    # ---- worker half ---------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def file(self, key: str, rank: int) -> Path:
        return self.folder / f"{key}.{rank}"

    def rows(self, cache: torch.Tensor, block: int) -> torch.Tensor:
        """A block of a layer. Kernels may count smaller blocks."""
        ratio = cache.shape[0] // self.blocks
        return cache[block * ratio : (block + 1) * ratio]

    def load(self, parts: list[Part]) -> None:
        for key, block in parts:
            for name, rows in torch.load(self.file(key, self.rank)).items():
                self.rows(self.caches[name], block).copy_(rows)

    def save(self, parts: list[Part]) -> None:
        for key, block in parts:
            if not (file := self.file(key, self.rank)).exists():
                written = file.with_suffix(f".{self.rank}-{os.getpid()}-{threading.get_ident()}")
                torch.save(
                    {name: self.rows(cache, block).clone() for name, cache in self.caches.items()}, written
                )
                written.replace(file)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for parts in self._get_connector_metadata().loads.values():
            self.load(parts)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for parts in self._get_connector_metadata().saves.values():
            self.save(parts)


class Evicts(WholeBlocks):
    """Keeps the blocks that were used last, as the CPU tier of OffloadingConnector."""

    def has(self, key: str) -> bool:
        with contextlib.suppress(FileNotFoundError):  # another engine evicts, too
            for rank in range(self.ranks):
                os.utime(self.file(key, rank))
            return True
        return False

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        with contextlib.suppress(FileNotFoundError):
            files = sorted(self.folder.glob(f"{self.prefix}-*"), key=lambda file: file.stat().st_mtime_ns)
            for file in files[: max(0, len(files) - CAPACITY * self.ranks)]:
                file.unlink()
        return super().build_connector_meta(scheduler_output)


class AsksRankZero(WholeBlocks):
    """The scheduler half waits for an answer of rank 0: as MooncakeStoreConnector, with LookupKeyClient."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.address = f"\0look-up-{self._kv_transfer_config.get_from_extra_config('lookup_rpc_port', 0)}"
        self.server: Any = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self.rank == 0:
            self.server = threading.Thread(target=self.serve, args=[Listener(self.address)], daemon=True)
            self.server.start()

    def serve(self, listener: Listener) -> None:
        with listener:
            while True:
                with listener.accept() as line:
                    if not (keys := line.recv()):  # shutdown
                        return
                    line.send(super().found(keys))

    def found(self, keys: list[str]) -> int:
        while keys:  # until rank 0 has registered its KV caches
            with contextlib.suppress(OSError), Client(self.address) as line:
                line.send(keys)
                return int(line.recv())
        return 0

    def shutdown(self) -> None:
        if self.server:
            Client(self.address).send([])
            self.server = self.server.join()


class LooksUpInTheBackground(WholeBlocks):
    """Answers None until a thread has looked a prompt up, and loads between steps: as MooncakeStoreConnector
    with load_async.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.answers: dict[str, list[int]] = {}  # request -> blocks found; empty: not known yet
        self.loading: dict[str, threading.Thread] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.local[request.request_id] = num_computed_tokens
        keys = self.keys(request)[: (request.num_tokens - 1) // self.size]
        if request.request_id not in self.answers:
            answer = self.answers[request.request_id] = []
            threading.Thread(target=lambda: answer.append(self.found(keys)), daemon=True).start()
        if not (found := self.answers[request.request_id]):
            return None, False
        tokens = max(0, found[0] * self.size - num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.answers.pop(request.request_id, None)  # after a preemption it looks again

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.answers.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for id, parts in self._get_connector_metadata().loads.items():
            self.loading[id] = threading.Thread(target=self.load, args=(parts,), daemon=True)
            self.loading[id].start()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loaded = {id for id, thread in self.loading.items() if not thread.is_alive()}
        for id in loaded:
            del self.loading[id]
        return None, loaded or None


class WritesBehind(WholeBlocks):
    """Saves some steps later, and keeps the blocks of a request until then: as LMCacheMPConnector."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.saving: set[str] = set()  # scheduler half: requests of which something was to be saved
        self.later: list[tuple[int, str, list[Part]]] = []  # worker half: step, request, what to save
        self.ordered: set[str] = set()  # requests of which something was to be saved
        self.ended: set[str] = set()  # those of them that have ended and are not reported
        self.step = 0

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        self.saving |= orders.saves.keys()
        return orders

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        keeps = request.request_id in self.saving
        self.saving.discard(request.request_id)
        return keeps, None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if kv_connector_metadata.flush:
            self.write(self.step + LATER)

    def write(self, until: int) -> None:
        """Make the saves that were ordered before a step."""
        for step, _, parts in self.later:
            if step <= until:
                self.save(parts)
        self.later = [later for later in self.later if later[0] > until]

    def wait_for_save(self) -> None:
        self.step += 1
        for id, parts in self._get_connector_metadata().saves.items():
            self.later.append((self.step + LATER, id, parts))
            self.ordered.add(id)
        self.write(self.step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.ended |= finished_req_ids & self.ordered
        saved = self.ended - {id for _, id, _ in self.later}
        self.ended -= saved
        self.ordered -= saved
        return saved or None, None


class InMemory(WholeBlocks):
    """Copies each whole block to the memory of its process, and loads it from there when the engine has lost
    it: as SimpleCPUOffloadConnector. Each half forgets the oldest blocks, both in the same order.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.saved: dict[str, None] = {}  # scheduler half: keys, the oldest first
        self.kept: dict[str, dict[str, torch.Tensor]] = {}  # worker half: key -> rows by layer, likewise

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

    def save(self, parts: list[Part]) -> None:
        for key, block in parts:
            rows = {name: self.rows(cache, block).clone() for name, cache in self.caches.items()}
            remember(self.kept, key, rows)

    def load(self, parts: list[Part]) -> None:
        for key, block in parts:
            for name, rows in self.kept[key].items():
                self.rows(self.caches[name], block).copy_(rows)


def remember(kept: dict[str, Any], key: str, value: Any) -> None:
    """Keep a value as the newest one, and no more than MEMORY of them."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > MEMORY:
        del kept[next(iter(kept))]
