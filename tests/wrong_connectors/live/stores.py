"""A store of whole blocks in the memory of its process, right ones in several designs, and wrong ones."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

Key = tuple[Any, ...]
SAVE_S = 1.6  # that SlowStore keeps the blocks of a request
SAVED: dict[tuple[Key, str], torch.Tensor] = {}  # (key of a block, layer) -> its content


@dataclass
class Plan(KVConnectorMetadata):
    saves: list[tuple[str, Key, int]] = field(default_factory=list)  # request, key, block id
    loads: list[tuple[Key, int]] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)  # requests that have ended, and whose blocks wait for saves


class BlockStore(KVConnectorBase_V1):
    """Right: saves each whole block in the step that fills it, under the tokens up to its end, as LMCache."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.size = vllm_config.cache_config.block_size
        self.requests: dict[str, Any] = {}
        self.tables: dict[str, list[int]] = {}
        self.first: dict[str, int] = {}  # request -> its first block that is not cached
        self.hits: dict[str, tuple[int, int]] = {}  # request -> blocks [first, end) to load

    # ---- scheduler half ----

    def key(self, request: Any, index: int) -> Key:
        return tuple(request.prompt_token_ids[: (index + 1) * self.size])

    def whole(self, request: Any) -> int:
        """Blocks of a prompt that can be saved: none if it has no token ids."""
        return 0 if request.prompt_token_ids is None else int(request.num_prompt_tokens - 1) // self.size

    def known(self, key: Key) -> bool:
        return any(saved == key for saved, _ in SAVED)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.requests[request.request_id] = request
        first = end = self.first[request.request_id] = num_computed_tokens // self.size
        while end < self.whole(request) and self.known(self.key(request, end)):
            end += 1
        return (end - first) * self.size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            table = blocks.get_block_ids()[0]
            first = self.first[request.request_id]
            self.hits[request.request_id] = first, first + num_external_tokens // self.size
            self.tables[request.request_id] = list(table)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        plan, cached = Plan(), scheduler_output.scheduled_cached_reqs
        self.note_tables(scheduler_output)
        done = {one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs}
        done |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, first in done.items():
            request, table = self.requests[name], self.tables[name]
            for index in range(*self.hits.pop(name, (0, 0))):
                plan.loads.append((self.key(request, index), table[index]))
            end = min(first + scheduler_output.num_scheduled_tokens[name], self.whole(request) * self.size)
            for index in range(first // self.size, end // self.size):
                plan.saves.append((name, self.key(request, index), self.block(table, index, first, name)))
        return plan

    def block(self, table: list[int], index: int, computed: int, name: str) -> int:
        """The block of a table that holds the block of tokens with this index."""
        return table[index]

    def note_tables(self, scheduler_output: Any) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        for one in scheduler_output.scheduled_new_reqs:
            self.tables[one.req_id] = list(one.block_ids[0])
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = []
            self.tables[name] += blocks[0] if blocks else []

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        for of_requests in (self.requests, self.tables, self.first, self.hits):
            of_requests.pop(request.request_id, None)
        return False, None

    # ---- worker half ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def plan(self) -> Plan:
        found = self._get_connector_metadata()
        assert isinstance(found, Plan)
        return found

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for key, block in self.plan().loads:
            for name, cache in self.caches.items():
                cache[block] = SAVED[key, name]

    def save(self, key: Key, block: int) -> None:
        for name, cache in self.caches.items():
            SAVED[key, name] = cache[block].clone()

    def wait_for_save(self) -> None:
        for _, key, block in self.plan().saves:
            self.save(key, block)

    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...


class LaterStore(BlockStore):
    """Right: saves a step later, after the forward, and before that if blocks are about to be overwritten, as
    vLLM's OffloadingConnector. Blocks of a request that has ended are kept until then.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.recent: set[str] = set()  # scheduler half: requests whose blocks are saved in the next step
        self.kept: set[str] = set()  # both halves
        self.queue: list[tuple[str, Key, int]] = []  # worker half

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        plan = super().build_connector_meta(scheduler_output)
        self.recent = {name for name, _, _ in plan.saves}
        plan.kept, self.kept = self.kept, set()
        return plan

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        super().request_finished(request, block_ids)
        if request.request_id not in self.recent:
            return False, None
        self.kept.add(request.request_id)
        return True, None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self.flush()

    def flush(self) -> None:
        for _, key, block in self.queue:
            self.save(key, block)
        self.queue = []

    def wait_for_save(self) -> None:
        self.flush()
        self.queue = list(self.plan().saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self.kept |= self.plan().kept
        done = self.kept - {name for name, _, _ in self.queue}
        self.kept -= done
        return KVConnectorTransferResults(done, set(), set())


class SlowStore(LaterStore):
    """Right: writes the blocks of each request to a slow place when it has ended, and keeps them so long."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.due: dict[str, float] = {}  # worker half: request -> when its blocks are written

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        super().request_finished(request, block_ids)
        self.kept.add(request.request_id)
        return True, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        now = time.monotonic()
        for name in super().get_transfer_results(finished_req_ids).finished_sending:
            self.due[name] = now + SAVE_S
        done = {name for name, due in self.due.items() if due <= now}
        for name in done:
            del self.due[name]
        return KVConnectorTransferResults(done, set(), set())


class IgnoresPreemptions(LaterStore):
    """Wrong: what it saves a step later may belong to another request by then."""

    def handle_preemptions(self, kv_connector_metadata: Any) -> None: ...


class CountsOnTheOrder(LaterStore):
    """Wrong: forgets an end for which wait_for_save was not yet called in the same step."""

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Right: saves of requests that have ended can wait, since nobody else gets their blocks."""
        ended = self.kept | kv_connector_metadata.kept
        for _, key, block in (one for one in self.queue if one[0] not in ended):
            self.save(key, block)
        self.queue = [one for one in self.queue if one[0] in ended]

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        self.kept = set()
        return results


class CountsFromTheEnd(BlockStore):
    """Wrong: takes the last blocks of a table for those of the last tokens, as if there were no others."""

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        self.counts = scheduler_output.num_scheduled_tokens
        return super().build_connector_meta(scheduler_output)

    def block(self, table: list[int], index: int, computed: int, name: str) -> int:
        return table[index - -(-(computed + self.counts[name]) // self.size)]


class KeysOfEmbeds(BlockStore):
    """Wrong: knows prompts by all_token_ids, which are zeros for embeddings."""

    def key(self, request: Any, index: int) -> Key:
        return tuple(request.all_token_ids[: (index + 1) * self.size])

    def whole(self, request: Any) -> int:
        return int(request.num_prompt_tokens - 1) // self.size


class KeepsResults(BlockStore):
    """Wrong: its worker half keeps a record of every load."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.records: list[int] = []

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self.records += [block for _, block in self.plan().loads]


class ExtendsResumedTables(BlockStore):
    """Wrong: takes the blocks of a resumed request for more blocks of it."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        before = self.tables.get(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if before is not None:
            self.tables[request.request_id] = before

    def note_tables(self, scheduler_output: Any) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        resumed, cached.resumed_req_ids = cached.resumed_req_ids, set()
        super().note_tables(scheduler_output)
        cached.resumed_req_ids = resumed
