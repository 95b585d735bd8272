"""Connectors that load less than a whole prompt, or a copy: right ones, and wrong ones beside them.

All are ReferenceConnector but for what the docstring says. How much is loaded is the connector's choice: D
computes the rest. Recurrent states and sliding windows leave no choice: P has the state after its last token
alone, and the KV of the last window alone.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from reference_connector import ReferenceConnector
from reference_connector.boxes import boxes_of
from reference_connector.connector import Metadata, WorkerReport
from reference_connector.leases import entry_of
from reference_connector.messages import LEDGER, Load
from reference_connector.transport import HOST, Memory
from reference_connector.worker import LoadError, Worker

CHUNK = 256
Ended = tuple[bool, dict[str, Any] | None]


def keeps_every_token(kv_cache_config: Any) -> bool:
    """Whether P has the KV of every token when a prompt is computed."""
    ends = MambaSpec, SlidingWindowSpec
    return not any(isinstance(group.kv_cache_spec, ends) for group in kv_cache_config.kv_cache_groups)


class Right(ReferenceConnector):
    """Nothing but ReferenceConnector."""


class StopsElsewhere(ReferenceConnector):
    """D's load ends at another token, if P has the KV of every token."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER and keeps_every_token(kv_cache_config):
            scheduler, size = self._scheduler, vllm_config.cache_config.block_size
            stop: Callable[[Any, int], int] = scheduler._stop
            scheduler._stop = lambda handoff, prompt: self.stop(stop(handoff, prompt), size)

    def stop(self, stop: int, block: int) -> int:
        """Where the load ends, instead of token `stop`."""
        raise NotImplementedError


class OneBlockLess(StopsElsewhere):
    """D loads whole blocks only, and leaves the last whole one to itself, as a store that keeps no block
    which may still be written to.
    """

    def stop(self, stop: int, block: int) -> int:
        return max(0, stop // block * block - block)


class LessOfSome(ReferenceConnector):
    """D leaves the last whole block of some requests to itself."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.less: dict[str, bool] = {}
        self.now = False  # whether the request that is asked about loads less
        if role == KVConnectorRole.SCHEDULER and keeps_every_token(kv_cache_config):
            scheduler, size = self._scheduler, vllm_config.cache_config.block_size
            stop: Callable[[Any, int], int] = scheduler._stop
            scheduler._stop = lambda handoff, prompt: self.cut(stop(handoff, prompt), size)

    def loads_less(self, request: Any) -> bool:
        """Whether the request that is asked about for the first time loads less."""
        raise NotImplementedError

    def cut(self, stop: int, block: int) -> int:
        return max(0, stop // block * block - block) if self.now else stop

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if request.request_id not in self.less:
            self.less[request.request_id] = self.loads_less(request)
        self.now = self.less[request.request_id]
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.now = self.less.get(request.request_id, False)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.less.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


class LessWhenBusy(LessOfSome):
    """D leaves the last whole block to itself if another load is under way when D is first asked, as a
    connector that weighs the time on the wire against that of computing.
    """

    def loads_less(self, request: Any) -> bool:
        return bool(self._scheduler._loading)


class LessNowAndThen(LessOfSome):
    """D leaves the last whole block of every second request to itself, as a connector that tries what is
    faster.
    """

    tries: ClassVar[Iterator[bool]] = itertools.cycle((False, True))

    def loads_less(self, request: Any) -> bool:
        return bool((request.kv_transfer_params or {}).get("do_remote_prefill")) and next(self.tries)


class MoreNowAndThen(LessNowAndThen):
    """D does so with the first one, and with every second one after it."""

    tries: ClassVar[Iterator[bool]] = itertools.cycle((True, False))


class Threshold(ReferenceConnector):
    """D loads nothing when fewer than 40 tokens are missing: to compute them is cheaper.

    As vLLM's NixlConnector with kv_recompute_threshold.
    """

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (tokens, asynchronous) if tokens and tokens >= 40 else (0, False)


class Chunked(StopsElsewhere):
    """D loads whole chunks of 256 tokens only, as LMCacheConnectorV1, and takes no model in which P does not
    keep the KV of every token.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        if not keeps_every_token(kv_cache_config):
            raise ValueError("states and sliding windows are not supported: they end at no chunk")
        super().__init__(vllm_config, role, kv_cache_config)

    def stop(self, stop: int, block: int) -> int:
        return stop // CHUNK * CHUNK


class PartOfABlock(StopsElsewhere):
    """The load ends inside the last whole block, and D computes the rest of this block, as behind the last
    chunk of LMCacheConnectorV1 with save_unfull_chunk.
    """

    def stop(self, stop: int, block: int) -> int:
        return max(0, stop // block * block - block // 2)


# ---- wrong ones --------------------------------------------------------------------------------------------


class MovesNothing(ReferenceConnector):
    """D loads nothing of any prompt."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False


# ---- P hands over a copy ----


@dataclass
class Copies(Metadata):
    """Copies that P's workers make before the step writes: the number of the lease, the request, leases whose
    slots it takes, and of each group the blocks and the slots.
    """

    copies: list[tuple[int, str, list[int], list[tuple[list[int], list[int]]]]] = field(default_factory=list)


@dataclass
class CopiesReport(WorkerReport):
    ended: Counter[int] = field(default_factory=Counter)  # lease -> ranks on which it has ended

    def aggregate(self, other: Any) -> Any:
        both: Any = super().aggregate(other)
        return CopiesReport(both.notified, both.missed, self.ended + other.ended)


class StagingWorker(Worker):
    """Publishes a pool of copies in host memory, and behind the ledger an array of leases that are copied."""

    def stage(self, kv_caches: dict[str, Any], boxes_of_copies: Any) -> None:
        self.ledgers = np.zeros(2 * LEDGER, np.int64)
        self._leases.ledger = self.ledgers[:LEDGER]
        pools = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in kv_caches.values()}
        self.pools = {at: torch.empty(pool.nbytes(), dtype=torch.uint8) for at, pool in pools.items()}
        self.caches = kv_caches
        self.copies = {
            name: torch.empty(0, dtype=view.dtype).set_(
                self.pools[view.untyped_storage().data_ptr()].untyped_storage(),
                view.storage_offset(),
                view.shape,
                view.stride(),
            )
            for name, view in kv_caches.items()
        }
        memory = [Memory(pool.data_ptr(), pool.nbytes) for pool in self.pools.values()]
        ledger = Memory(self.ledgers.ctypes.data, self.ledgers.nbytes)
        self._transport.register([*memory, ledger])
        self.published = msgspec.structs.replace(
            self.published,
            agent=self._transport.metadata(),
            place=HOST,
            ledger=ledger.address,
            boxes=boxes_of_copies(self.copies),
        )

    def copy(
        self, number: int, recalled: list[int], groups: list[tuple[Any, int, list[int], list[int]]]
    ) -> None:
        """Copy blocks to slots. `groups`: names of layers, blocks in the pool, blocks, slots."""
        self._results.sent |= self._leases._end(self._leases._given.keys() & set(recalled))
        for names, size, blocks, slots in groups:
            for name in names & self.caches.keys():
                cache, copies = self.caches[name], self.copies[name]
                ratio = cache.shape[0] // size
                for block, slot in zip(blocks, slots, strict=True):
                    here, there = (slice(at * ratio, (at + 1) * ratio) for at in (block, slot))
                    copies[there].copy_(cache[here])
        self.ledgers[LEDGER + entry_of(number)] = number
        self._results.sent |= self._leases.give({number: str(number)})

    def _load(self, load: Load) -> Iterator[Any]:
        lease, deadline = load.handoff.lease, time.monotonic() + self._options.transfer_timeout
        copied, entry = False, LEDGER + entry_of(lease.number)
        while not copied:
            peer = yield from self._peers.meet(lease.peer, deadline)  # another one, if a read has failed
            found = yield from self._reads.read_ledgers(peer, range(len(peer.ranks)), entry, deadline)
            copied = (found >= lease.number).all()
            if not copied and time.monotonic() > deadline:
                raise LoadError(f"{lease.peer} has not copied lease {lease.number}")
            yield
        yield from super()._load(load)


class StagesCopies(ReferenceConnector):
    """P copies what it hands over to host memory in its next step, and frees the blocks at once: as
    P2pNcclConnector with its buffer of sends. D reads the copy, which stays for the time of a lease.

    vLLM's second model runner zeroes new blocks before handle_preemptions: where it does so, P keeps the
    blocks until they are copied.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.size = vllm_config.parallel_config.tensor_parallel_size
        self.keeps = kv_cache_config.needs_kv_cache_zeroing
        self.slots = deque(range(1, kv_cache_config.num_blocks))
        self.staged: dict[int, list[int]] = {}  # lease -> its slots
        self.left: Counter[int] = Counter()  # lease -> ranks on which it has not ended
        self.copies: list[Any] = []
        self.ended: Counter[int] = Counter()  # of a worker
        self.made: set[str] = set()

    # ---- the scheduler half

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        if not kept or params is None:
            return kept, params
        number, tables, recalled = params["remote_lease"], params["remote_block_ids"], []
        while len(self.slots) < sum(map(len, tables)):
            recalled.append(next(iter(self.staged)))
            self.drop(recalled[-1])
        slots = [[self.slots.popleft() for _ in table] for table in tables]
        self.copies.append((number, request.request_id, recalled, list(zip(tables, slots, strict=True))))
        self.staged[number], self.left[number] = list(itertools.chain(*slots)), self.size
        return self.keeps, params | {"remote_block_ids": slots}

    def drop(self, number: int) -> None:
        self.slots.extend(self.staged.pop(number, ()))
        self.left.pop(number, None)

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        orders = self._scheduler.take_orders()
        orders.leases.clear()
        copies, self.copies = self.copies, []
        return Copies(orders, copies)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        for number, ranks in report.ended.items() if isinstance(report, CopiesReport) else ():
            if number in self.staged:
                self.left[number] -= ranks
                if self.left[number] <= 0:
                    self.drop(number)

    def has_pending_push_work(self) -> bool:
        """P goes on stepping while there are copies: NIXL without a thread sends in calls of P alone."""
        return bool(self.staged) or super().has_pending_push_work()

    # ---- the worker half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker: Any = self._worker
        worker.__class__ = StagingWorker
        ranks = worker._rank, self.size
        worker.stage(
            kv_caches, lambda views: boxes_of(self._vllm_config, self._kv_cache_config, views, *ranks)
        )

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        config = self._kv_cache_config
        layers = [set(group.layer_names) for group in config.transfer_groups]
        for number, name, recalled, groups in getattr(kv_connector_metadata, "copies", ()):
            tables = [(names, config.num_blocks, *group) for names, group in zip(layers, groups, strict=True)]
            self._worker.copy(number, recalled, tables)
            self.made |= {name} if self.keeps else set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        self.ended.update(map(int, results.finished_sending))
        made, self.made = self.made, set()
        return KVConnectorTransferResults(made, results.finished_recving, results.failed_recving)

    def build_connector_worker_meta(self) -> Any:
        report: Any = super().build_connector_worker_meta() or WorkerReport()
        ended, self.ended = self.ended, Counter()
        if not (report.notified or report.missed or ended):
            return None
        return CopiesReport(report.notified, report.missed, ended)


class CopiesNothing(ReferenceConnector):
    """Wrong: P frees its blocks at once, and D reads them as if they were a copy."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        return False, super().request_finished_all_groups(request, block_ids)[1]

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        return KVConnectorTransferResults(set(), results.finished_recving, results.failed_recving)
