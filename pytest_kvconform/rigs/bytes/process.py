"""A byte engine in a process of its own: vLLM's EngineCore, Scheduler and KVCacheManager, without a model.

Its workers are `bytes.worker.ByteWorker`: at tensor parallel size 1 in this process, as vLLM does, else one
forked process a rank. The process knows which request has which blocks, and sends that to the ranks with each
step (`StepWork`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from pytest_kvconform.kvspace.pools.sources import Source
from pytest_kvconform.rigs.bytes.messages import (
    ByteEngineSpec,
    Check,
    LoadCheck,
    StepPart,
    StepWork,
    token_after,
)
from pytest_kvconform.rigs.bytes.on_demand import OnDemand
from pytest_kvconform.rigs.bytes.overwriter import Overwriter, blocks_of
from pytest_kvconform.rigs.bytes.specs import geometry_of
from pytest_kvconform.rigs.engine import process as engine_process
from pytest_kvconform.rigs.engine.answers import CheckingRecorder
from pytest_kvconform.rigs.engine.messages import Leftovers, Request, Step
from pytest_kvconform.rigs.engine.process import positions_of
from pytest_kvconform.rigs.tap import around
from pytest_kvconform.rigs.vllm_setup.compat import watch_unpinned
from pytest_kvconform.rigs.vllm_setup.engine_config import geometry_config
from pytest_kvconform.rigs.vllm_setup.overrides import keep_configured_limits
from pytest_kvconform.rigs.vllm_setup.stand_ins import device
from pytest_kvconform.rigs.vllm_setup.statistics import StatisticsPath, StatisticsTrace

NEVER = 4  # a token that no engine generates


def serve(connection: Any, spec: ByteEngineSpec) -> None:
    """Run the engine in a child of the zygote, see `engine.process.serve`."""
    engine_process.serve(connection, spec, ByteEngineProcess)


def tokens_after(position: int, drafts: Sequence[int]) -> tuple[int, ...]:
    """The tokens that a step generates after `position` tokens: the drafts that are right, and one more."""
    right = itertools.takewhile(lambda i: drafts[i] == token_after(position + i), range(len(drafts)))
    return tuple(token_after(position + i) for i in range(1 + len(list(right))))


def drafts_after(position: int, number: int) -> tuple[int, ...]:
    """The tokens that the draft model proposes after `position` tokens: a right one, then wrong ones."""
    return (token_after(position), *(NEVER,) * (number - 1)) if number else ()


class ByteEngineProcess(OnDemand):
    """One byte engine."""

    def __init__(self, spec: ByteEngineSpec):
        self.requests: dict[str, Any] = {}  # id -> ByteRequest
        # id -> tokens hit locally, blocks that the connector may write
        self.loading: dict[str, tuple[int, set[int]]] = {}
        # (layer, number of the request) -> block ids
        self.tables: dict[tuple[str, int], tuple[int, ...]] = {}
        self.writers: dict[int, list[int]] = {}  # see `mistakes.Source`
        # id -> blocks that it has had, and that were not freed since
        self.held: dict[str, set[int]] = {}
        self.preempting = ""
        self.overwriter = Overwriter(self)
        self.replaying = False
        if spec.few:
            self.recorder_class, self.log_stats = CheckingRecorder, True
        super().__init__(spec)
        self.statistics_path.watch(self.scheduler)
        # group whose content a block has
        self.owner_of_block = np.full(self.kv_config.num_blocks, -1, dtype=np.int8)
        self._watch_blocks()
        if spec.first_block:
            self.manager.block_pool.free_block_queue.popleft_n(spec.first_block)
            self.manager.block_pool.num_gpu_blocks -= spec.first_block

    def _configure(self, spec: ByteEngineSpec) -> Any:
        from pytest_kvconform.rigs.bytes import worker as byte_worker

        byte_worker.spec_of_process = spec
        if spec.layout:
            os.environ["VLLM_KV_CACHE_LAYOUT"] = spec.layout
        keep_configured_limits(everywhere=True)
        config = geometry_config(
            geometry_of(spec),
            block_size=spec.block_size,
            conv_layout=spec.conv_layout,
            cache_dtype=spec.cache_dtype,
            max_model_len=spec.max_model_len,
            max_batched_tokens=spec.max_batched_tokens,
            max_seqs=spec.max_seqs,
            tensor_parallel=spec.tensor_parallel,
            kv_transfer=spec.kv_transfer_config,
            num_blocks=spec.num_blocks,
            prefix_caching=spec.prefix_caching,
            more=spec.engine_arguments,
        )
        config.scheduler_config.async_scheduling = spec.in_flight  # vLLM turns it off on CPUs
        config.parallel_config.worker_cls = "pytest_kvconform.rigs.bytes.worker.ByteWorker"
        self.statistics_path = StatisticsPath(config, mended=bool(spec.fake))
        return config

    # ---- calls ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Hand a request (ByteRequest) to the scheduler."""
        self.requests[request.id] = request
        super().add(request)

    def pop_checks(self, request_id: str = "") -> tuple[Check, ...]:
        """Return and forget the checks of a request, or of all: for each load one per rank.

        They were made before the first forward that reads the loaded KV.
        """
        return tuple(check for checks in self._workers("kv_pop_checks", request_id) for check in checks)

    def audit(self) -> tuple[Check, ...]:
        """Compare the whole pool of every rank with what it should hold. A difference is reported once."""
        return tuple(self._workers("kv_audit", self.owner_of_block, self._loading()))

    def source(self) -> Source:
        """Where rank 0 has the rows of every request since the last call."""
        tables, self.tables = self.tables, {}
        writers = {block: tuple(owners) for block, owners in self.writers.items()}
        return Source(self._workers("kv_regions")[0], tables, writers)

    def preempt(self, request_id: str) -> None:
        """Let the scheduler find no block in its next step that runs this request, so that it preempts it."""
        self.preempting = request_id

    def step(self, seconds: float) -> Step:
        """Run steps, see `EngineProcess.step`. They overwrite blocks that were freed before."""
        self.overwriter.admit()
        if self.spec.few:
            return self.step_of_script()
        return super().step(seconds)

    def reuse(self, on: bool) -> None:
        """Let other requests overwrite blocks in the next step after they were freed.

        This is the worst that may happen to freed blocks.
        """
        self.overwriter.turn(on)

    def holds(self, request_id: str) -> bool:
        """Whether the scheduler knows a request, or a block is not free that it has had.

        A connector may hold blocks of a request that vLLM has forgotten: it has referenced them in the pool.
        """
        return request_id in self.scheduler.requests or request_id in self.held

    def overwritten(self) -> bool:
        """Whether every block that was freed has been overwritten."""
        return self.overwriter.idle

    def replay(self, on: bool) -> None:
        """Replay steps in which every request computes one token as full CUDA graphs.

        This is vLLM's default on GPUs, cudagraph_mode FULL_AND_PIECEWISE (v1/worker/gpu/cudagraph_utils.py).
        """
        self.replaying = on

    def flip(self, rank: int, layer: str, block: int, byte: int) -> None:
        """Corrupt a byte of one rank's pool: for tests of the rig."""
        self._workers(_flip, rank, layer, block, byte)

    def shutdown(self) -> Leftovers:
        """Shut down as vLLM's EngineCore.shutdown does. Returns what the process still has."""
        self.statistics_path.close()
        return super().shutdown()

    def statistics(self) -> StatisticsTrace:
        """What became of the statistics that the connector has reported since the last call."""
        return self.statistics_path.trace()

    def copies_left(self) -> int:
        """How many copies the suite's copy engine has still to make, in all ranks."""
        return sum(self._workers(_copies_left))

    # ---- watching ------------------------------------------------------------------------------------------

    def _state_layers(self) -> frozenset[str]:
        return frozenset(self._workers("kv_layer_facts")[0]["states"])

    def _backend(self) -> str:
        name: str = self._workers("kv_layer_facts")[0]["backend"]
        return name

    def _poison_blocks(self, blocks: list[int]) -> None:
        ids = np.array(blocks, dtype=np.int64)
        self.owner_of_block[ids] = -1
        for block in blocks:
            self.writers.pop(block, None)
        self._workers("kv_poison", ids)

    def _watch_connector(self) -> None:
        super()._watch_connector()

        def note_load(hook: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens and request.request_id in self.requests:
                local = self.recorder.local_hits[request.request_id]
                self.loading[request.request_id] = local, self._note_blocks(request.request_id, local)
            hook(request, blocks, num_external_tokens)

        around(self.scheduler.connector, "update_state_after_alloc", note_load)

    def _note_blocks(self, request_id: str, local: int = 0) -> set[int]:
        """Note which groups a request's blocks belong to.

        Returns the blocks behind its first `local` tokens.
        """
        behind = set()
        for index, table in enumerate(self._tables(request_id)):
            real = table[table != 0]
            self.owner_of_block[real] = index
            behind |= {int(b) for b in table[local // self.groups[index].block_size :] if b}
        return behind

    def _tables(self, request_id: str) -> tuple[np.ndarray, ...]:
        return tuple(np.array(ids, dtype=np.int64) for ids in self.manager.get_block_ids(request_id))

    def _watch_steps(self) -> None:
        execute = self.core.model_executor.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            scheduler_output.byte_work = self._work(scheduler_output)
            self.bring_fake_loads(scheduler_output)
            return execute(scheduler_output, *args, **kwargs)

        self.core.model_executor.execute_model = execute_model
        self.watch_updates()

    def _work(self, scheduler_output: Any) -> StepWork:
        """What the ranks write and check in this step."""
        parts, load_checks = [], []
        loading, drafted = self._loading(), self.scheduler.num_spec_tokens
        for request_id, position in positions_of(scheduler_output).items():
            scheduled = scheduler_output.num_scheduled_tokens[request_id]
            request, end = self.scheduler.requests[request_id], position + scheduled
            trace = self.traces[request_id]
            first = position < request.num_prompt_tokens and self._note_computed(
                trace, request.num_prompt_tokens, position, scheduled
            )
            self._note_blocks(request_id)
            tables, owners = self._tables(request_id), self._owners(request_id, end)
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
            known = end - len(drafts)
            last = known >= request.num_tokens
            self.overwriter.note_scheduled(request_id, blocks_of(tables), last)
            self.held.setdefault(request_id, set()).update(blocks_of(tables))
            for index, table in enumerate(tables):
                self._note_writers(table, self.groups[index].block_size, position, owners)
                for name in self.groups[index].layers:
                    self.tables[name, self.requests[request_id].number] = tuple(table.tolist())
            tokens = tokens_after(known, drafts) if last else ()
            proposed = drafts_after(known + len(tokens), drafted) if last else ()
            parts.append(StepPart(request_id, position, end, owners[position:], tables, tokens, proposed))
            if request_id in self.loading or (first and self.requests[request_id].watch):
                local, blocks = self.loading.pop(request_id, (position, set()))
                loaded = np.array(sorted(blocks), dtype=np.int64)
                load_checks.append(
                    LoadCheck(
                        request_id,
                        local,
                        position,
                        owners[:position],
                        tables,
                        loaded,
                        self.spec.prefix_caching,
                        self.requests[request_id].either,
                    )
                )
        return StepWork(
            tuple(parts),
            tuple(load_checks),
            scheduler_output.has_sync_kv_loads,
            self.owner_of_block,
            loading,
            self.replaying
            and all(part.end == part.first + 1 + self.scheduler.num_spec_tokens for part in parts),
        )

    def _note_writers(self, table: np.ndarray, size: int, first: int, owners: np.ndarray) -> None:
        """Note whose words a step writes into the blocks of a table: those of tokens `first` and later ones.

        `size`: tokens of a block. `owners`: of all tokens.
        """
        tokens = np.arange(first, len(owners))
        pairs = np.stack([table[np.minimum(tokens // size, len(table) - 1)], owners[first:]], axis=1)
        for block, owner in np.unique(pairs, axis=0).tolist() if len(table) else ():
            writers = self.writers.setdefault(block, [])
            if writers[-1:] != [owner]:
                writers.append(owner)

    def _owners(self, request_id: str, end: int) -> np.ndarray:
        """Owner of each of the first `end` tokens."""
        known = self.requests[request_id]
        return np.concatenate([known.owners, np.full(max(0, end - len(known.owners)), known.number)])[
            :end
        ].astype(np.int64)

    def _loading(self) -> np.ndarray:
        """Blocks that connectors may write right now."""
        return np.array(sorted({b for _, blocks in self.loading.values() for b in blocks}), dtype=np.int64)

    def _watch_blocks(self) -> None:
        """Wrap the block pool: notice blocks that are freed, and let one allocation fail for `preempt`."""
        pool, manager = self.manager.block_pool, self.manager
        free, allocate = pool.free_blocks, manager.allocate_slots

        def free_blocks(ordered_blocks: Any) -> None:
            blocks = list(ordered_blocks)
            free(blocks)
            self._note_freed([block for block in blocks if not block.ref_cnt and not block.is_null])

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            if self.takes_blocks(request.request_id):
                return None
            victim = self.scheduler.requests.get(self.preempting)
            if victim is not None and victim.num_preemptions:
                self.preempting = ""
            elif victim in self.scheduler.running:  # with a step in flight vLLM cannot preempt it yet
                self.scheduler.running.remove(victim)
                self.scheduler.running.append(victim)  # the last one is the one to go
                return None
            return allocate(request, *args, **kwargs)

        pool.free_blocks, manager.allocate_slots = free_blocks, allocate_slots
        watch_unpinned(pool, self._forget_held)

    def _note_freed(self, blocks: list[Any]) -> None:
        """Note blocks that were freed. What loads wrote into them is not compared."""
        ids = {block.block_id for block in blocks}
        if late := ids & {b for _, loading in self.loading.values() for b in loading}:
            self._workers("kv_accept", np.array(sorted(late), dtype=np.int64))
            self.loading = {
                r: (local, loading - late) for r, (local, loading) in self.loading.items() if loading - late
            }
        self.overwriter.note_freed(ids)
        self._forget_held(ids)

    def _forget_held(self, free: set[int]) -> None:
        self.held = {request: held - free for request, held in self.held.items() if held - free}


def _copies_left(worker: Any) -> int:
    return device.copies_left()


def _flip(worker: Any, rank: int, layer: str, block: int, byte: int) -> None:
    if worker.rank == rank:
        worker.kv_flip(layer, block, byte)
