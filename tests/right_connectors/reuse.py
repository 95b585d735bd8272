"""Connectors that look at what vLLM tells of its pool, its size, who gets a block next, who holds it; and
stores that save in the background.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorWorkerMetadata

from reference_connector import ReferenceConnector

from .sockets import Orders, TcpPull
from .stores import Orders as StoreOrders
from .stores import WholeBlocks

SAVES_S = 0.05  # after the step that ordered a save


class Right(ReferenceConnector):
    """Nothing but ReferenceConnector."""


class CountsBlocks(ReferenceConnector):
    """Takes the size of the pool from the configuration when the caches are registered, as vLLM's
    MooncakeStoreConnector.
    """

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = self._vllm_config.cache_config.num_gpu_blocks
        assert blocks is not None
        assert all(len(cache) % blocks == 0 for cache in kv_caches.values())
        super().register_kv_caches(kv_caches)


@dataclass
class Savings(Orders):
    """Blocks that this step gives to other requests."""

    taken: frozenset[int] = field(default_factory=frozenset)


class SavesBeforeReuse(TcpPull):
    """P frees its blocks at once, and copies them to host memory in the step that gives them to another
    request, as vLLM's SimpleCPUOffloadConnector does in lazy mode.
    """

    def start_worker(self, serves: bool) -> None:
        self.saved: dict[str, list[bytes]] = {}
        self.lock = threading.Lock()
        super().start_worker(serves)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        _, params = super().request_finished_all_groups(request, block_ids)
        return False, params

    def build_connector_meta(self, scheduler_output: Any) -> Savings:
        orders = super().build_connector_meta(scheduler_output)
        taken = {
            block for one in scheduler_output.scheduled_new_reqs for ids in one.block_ids for block in ids
        }
        return Savings(orders.loads, orders.sends, orders.releases, taken)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Copy what the step is about to overwrite: start_load_kv comes after the forward."""
        orders = kv_connector_metadata
        with self.lock:
            held = {request: blocks for request, (blocks, _) in self.leases.items()} | orders.sends
            for request, blocks in held.items():
                if request not in self.saved and orders.taken & set(blocks):
                    self.saved[request] = [self.rows(layer, blocks) for layer in range(len(self.caches))]

    def rows(self, layer: int, blocks: list[int]) -> bytes:
        return self.caches[layer][blocks].contiguous().view(torch.uint8).numpy().tobytes()

    def rows_of(self, request: str, layer: int, blocks: list[int]) -> bytes:
        """The bytes of these blocks, the last ones of the request, as P has computed them."""
        with self.lock:
            if request not in self.saved:
                return self.rows(layer, blocks)
            whole = self.saved[request][layer]
            return whole[-len(whole) // len(self.leases[request][0]) * len(blocks) :]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        found = super().get_transfer_results(finished_req_ids)
        found.finished_sending.clear()  # vLLM does not wait for them
        return found

    def send(self, peer: socket.socket, request: str, layer: int, blocks: list[int]) -> None:
        peer.sendall(self.rows_of(request, layer, blocks))


@dataclass
class Saved(KVConnectorWorkerMetadata):
    """Steps whose saves are made."""

    steps: set[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Saved:
        assert isinstance(other, Saved)
        return Saved(self.steps | other.steps)


@dataclass
class NumberedOrders(StoreOrders):
    """The orders of a step."""

    step: int = 0


class HoldsBlocks(WholeBlocks):
    """A store that holds the blocks of a save in vLLM's pool until it is made, some time later and after the
    request: as MooncakeStoreConnector and SimpleCPUOffloadConnector. For engines of one rank.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.held: dict[int, list[Any]] = {}  # scheduler half: step -> blocks
        self.made: set[int] = set()  # worker half: steps
        self.step = 0

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    def build_connector_meta(self, scheduler_output: Any) -> NumberedOrders:
        orders = super().build_connector_meta(scheduler_output)
        self.step += 1
        if saved := [block for parts in orders.saves.values() for _, block in parts]:
            self.held[self.step] = [self.pool.blocks[block] for block in saved]
            self.pool.touch(self.held[self.step])
        return NumberedOrders(orders.loads, orders.saves, orders.flush, self.step)

    def wait_for_save(self) -> None:
        orders = self._get_connector_metadata()
        if parts := [part for parts in orders.saves.values() for part in parts]:
            threading.Timer(SAVES_S, self.save_later, [orders.step, parts]).start()

    def save_later(self, step: int, parts: list[Any]) -> None:
        self.save(parts)
        self.made.add(step)

    def build_connector_worker_meta(self) -> Saved | None:
        made = set(self.made)
        self.made -= made
        return Saved(made) if made else None

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(saved := connector_output.kv_connector_worker_meta, Saved):
            for step in saved.steps:
                self.pool.free_blocks(reversed(self.held.pop(step)))


class HoldsBlocksForEver(HoldsBlocks):
    """Wrong: the report that a save is made is never read."""

    def update_connector_output(self, connector_output: Any) -> None:
        pass


# ---- a store that learns later what it has saved ----


@dataclass
class Written(KVConnectorWorkerMetadata):
    """What is written, a block by its key or a save by its request -> how often, by all ranks."""

    keys: Counter[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Written:
        assert isinstance(other, Written)
        return Written(self.keys + other.keys)


class FindsLater(WholeBlocks):
    """Copies what it saves, and writes the copy in the background. Its scheduler half finds what all workers
    have reported as written. Reports travel with steps: as SparkContextCacheConnector.
    """

    seconds = SAVES_S

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.reported: Counter[str] = Counter()  # scheduler half: key -> by how many ranks
        self.ordered: set[str] = set()  # worker half
        self.written: set[str] = set()

    def has(self, key: str) -> bool:
        return self.reported[key] == self.ranks

    def wait_for_save(self) -> None:
        for parts in self._get_connector_metadata().saves.values():
            copies = {
                key: {name: self.rows(cache, block).clone() for name, cache in self.caches.items()}
                for key, block in parts
                if key not in self.ordered
            }
            self.ordered |= copies.keys()
            threading.Timer(self.seconds, self.write, [copies]).start()

    def write(self, copies: dict[str, Any]) -> None:
        for key, copy in copies.items():
            torch.save(copy, self.file(key, self.rank))
        self.written |= copies.keys()

    def build_connector_worker_meta(self) -> Written | None:
        written, self.written = self.written, set()
        return Written(Counter(written)) if written else None

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(of_workers := connector_output.kv_connector_worker_meta, Written):
            self.reported += of_workers.keys

    def reset_cache(self) -> bool | None:
        self.reported.clear()
        self.ordered.clear()
        return super().reset_cache()


class FindsMuchLater(FindsLater):
    """Writes its copies a second later: on a busy machine, too, the next request comes before."""

    seconds = 1.0


class FindsNothing(FindsLater):
    """Wrong: the report is never read."""

    def update_connector_output(self, connector_output: Any) -> None:
        pass


# ---- a store that keeps blocks as long as it needs them ----


@dataclass
class KeepingOrders(StoreOrders):
    """The orders of a step, and requests that have ended and whose blocks are kept until they are saved."""

    kept: set[str] = field(default_factory=set)


class SavesInBackground(WholeBlocks):
    """Saves in threads, which are quick or slow, and keeps the blocks of a request only if a save of them is
    under way at its end: as OffloadingConnector.
    """

    pauses: ClassVar[Iterator[float]] = itertools.cycle((0.0, SAVES_S))  # seconds

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.under_way: Counter[str] = Counter()  # scheduler half: request -> saves, of all ranks
        self.kept: set[str] = set()  # requests that have ended since the last step
        self.saving: list[tuple[str, threading.Thread]] = []  # worker half: request, its save
        self.owed: set[str] = set()  # requests whose saves the scheduler waits for

    # ---- scheduler half ------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> KeepingOrders:
        orders = super().build_connector_meta(scheduler_output)
        self.under_way.update(dict.fromkeys(orders.saves, self.ranks))
        kept, self.kept = self.kept, set()
        return KeepingOrders(orders.loads, orders.saves, orders.flush, kept)

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(of_workers := connector_output.kv_connector_worker_meta, Written):
            self.under_way -= of_workers.keys

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        keeps = self.under_way.pop(request.request_id, 0) > 0
        if keeps:
            self.kept.add(request.request_id)
        return keeps, None

    # ---- worker half ---------------------------------------------------------------------------------------

    def wait_for_save(self) -> None:
        for id, parts in self._get_connector_metadata().saves.items():
            pause = next(self.pauses)
            thread = threading.Thread(target=self.save_after, args=(pause, parts))
            thread.start()
            if not pause:
                thread.join()
            self.saving.append((id, thread))

    def save_after(self, pause: float, parts: list[Any]) -> None:
        time.sleep(pause)
        self.save(parts)

    def end_saves(self) -> None:
        for _, thread in self.saving:
            thread.join()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if kv_connector_metadata.flush:
            self.end_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.owed |= self._get_connector_metadata().kept
        saved = self.owed - {id for id, thread in self.saving if thread.is_alive()}
        self.owed -= saved
        return saved or None, None

    def build_connector_worker_meta(self) -> Written | None:
        alive = [(id, thread) for id, thread in self.saving if thread.is_alive()]
        ended = Counter(id for id, _ in self.saving) - Counter(id for id, _ in alive)
        self.saving = alive
        return Written(ended) if ended else None

    def shutdown(self) -> None:
        self.end_saves()


class KeepsWhatTheLastStepLacks(SavesInBackground):
    """Wrong: it keeps blocks for ever if the last build_connector_meta did not name their request."""

    def build_connector_meta(self, scheduler_output: Any) -> KeepingOrders:
        self.last = set(scheduler_output.num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        keeps, _ = super().request_finished(request, block_ids)
        return keeps or request.request_id not in self.last, None
