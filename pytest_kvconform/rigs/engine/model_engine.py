"""An engine of the engine rig: a vLLM engine with a tiny checkpoint, whose KV cache the harness accesses.

Before the first step that reads loaded KV, the process takes a snapshot of a watched request's KV. In the
oracle's run the harness itself puts P's snapshot into D's cache, and the connector never hears of the
request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pytest_kvconform.rigs.engine import kv_access
from pytest_kvconform.rigs.engine.messages import EngineSpec, Request, Snapshot
from pytest_kvconform.rigs.engine.process import EngineProcess, positions_of
from pytest_kvconform.rigs.engine.process import serve as serve_engine
from pytest_kvconform.rigs.tap import around
from pytest_kvconform.rigs.vllm_setup.compat import hook_of_ends, without_requests
from pytest_kvconform.rigs.vllm_setup.engine_config import engine_config
from pytest_kvconform.rigs.vllm_setup.overrides import arguments_on_cpu, keep_configured_limits
from pytest_kvconform.rigs.vllm_setup.worker import worker_half

HIDDEN = "_kvconform_hidden"  # attribute of a connector: requests of whose end its worker half does not hear
States = dict[str, tuple[np.ndarray, ...]]  # layer -> one rank's share of its state


def serve(connection: Connection, spec: EngineSpec) -> None:
    """Run the engine in a child of the zygote, see `engine.process.serve`."""
    serve_engine(connection, spec, ModelEngineProcess)


class ModelEngineProcess(EngineProcess):
    """One engine with a model."""

    def __init__(self, spec: EngineSpec):
        # request -> digest of every block when the request was added
        self.watched: dict[str, np.ndarray] = {}
        # Watched request -> blocks that any request held since it was added.
        self.held: dict[str, set[int]] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.oracles: dict[str, Snapshot] = {}  # request -> KV that the harness puts in place
        super().__init__(spec)

    def _configure(self, spec: EngineSpec) -> Any:
        keep_configured_limits()
        more = {"max_logprobs": -1} | spec.engine_arguments
        return engine_config(
            spec.checkpoint,
            dtype=spec.dtype,
            block_size=spec.block_size,
            max_model_len=spec.max_model_len,
            max_batched_tokens=spec.max_batched_tokens,
            max_seqs=8,
            tensor_parallel=spec.tensor_parallel,
            kv_transfer=spec.kv_transfer_config,
            num_blocks=spec.num_blocks,
            more=arguments_on_cpu(more),
        )

    @functools.cached_property
    def _layers(self) -> dict[str, dict[str, Any]]:
        """Layer -> what the cache of its first rank is, see `kv_access.describe`."""
        described: dict[str, dict[str, Any]] = self._workers(kv_access.describe)[0]
        return described

    def _state_layers(self) -> frozenset[str]:
        return frozenset(name for name, layer in self._layers.items() if layer["kind"] == "state")

    def _backend(self) -> str:
        backends = (layer["backend"] for layer in self._layers.values() if layer["kind"] == "attention")
        return ", ".join(dict.fromkeys(backends))

    def _heads(self, name: str) -> int:
        """KV heads of a layer of the model or of its draft."""
        layer, models = self._layers[name], self.config
        config = models.speculative_config.draft_model_config if layer["draft"] else models.model_config
        heads: int = config.get_total_num_kv_heads()
        return 1 if layer["latent"] else heads

    def _poison_blocks(self, blocks: list[int]) -> None:
        self._workers(kv_access.poison, blocks)

    # ---- calls ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Hand a request to the scheduler."""
        if request.watch:
            self.watched[request.id] = self._digest() if self.spec.role == "D" else np.empty(0)
        if request.oracle is not None:
            self.oracles[request.id] = request.oracle
            self._workers(hide_end, request.id)
        super().add(request)

    def pop_snapshot(self, request_id: str) -> Snapshot | None:
        """The snapshot of a watched request, once; None if no forward has read loaded KV."""
        return self.snapshots.pop(request_id, None)

    # ---- watching ------------------------------------------------------------------------------------------

    def _watch_connector(self) -> None:
        """Keep the hooks of the connector's scheduler half away from requests that the oracle serves.

        A connector that follows every request would fail on one that no hook named. Workers: `hide_end`.
        """
        super()._watch_connector()
        self._hide_oracle("get_num_new_matched_tokens", self._oracle_tokens)
        self._hide_oracle("update_state_after_alloc", lambda r, blocks, n: self._note_allocation(r, n))
        self._hide_oracle("request_finished", lambda r, block_ids: (False, None))
        self._hide_oracle("request_finished_all_groups", lambda r, block_ids: (False, None))
        self._hide_oracle("on_new_request", lambda r: None)
        around(
            self.scheduler.connector,
            "build_connector_meta",
            lambda hook, output: hook(without_requests(output, self.oracles)),
        )

    def _oracle_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens after `computed` ones the oracle brings: at most all but the last."""
        self.recorder.local_hits[request.request_id] = computed
        tokens = min(request.num_tokens - 1, self.oracles[request.request_id].tokens)
        return max(0, tokens - computed), False

    def _hide_oracle(self, name: str, answer: Callable[..., Any]) -> None:
        """Let a hook of the connector answer for requests of the oracle what `answer` returns."""

        def hidden(hook: Any, request: Any, *args: Any) -> Any:
            return (answer if request.request_id in self.oracles else hook)(request, *args)

        around(self.scheduler.connector, name, hidden)

    def _watch_steps(self) -> None:
        executor = self.core.model_executor
        execute, sample = executor.execute_model, executor.sample_tokens
        # Requests of which a snapshot is taken after the step: tokens; states that were read before.
        later: dict[str, int] = {}
        states: dict[str, list[States]] = {}

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            positions = positions_of(scheduler_output)
            later.clear()
            slots: dict[str, dict[str, int]] = {}
            writable = self._writable()
            for request_id in self.watched:
                # also blocks of requests that have ended by then
                self.held.setdefault(request_id, set()).update(writable)
            for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
                if request_id in self.traces:
                    position = positions[request_id]
                    drafted = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
                    # D's first step is padded with placeholders below 0 (vllm/v1/core/sched/scheduler.py)
                    self.traces[request_id].drafted += sum(token >= 0 for token in drafted)
                    if self._before_step(request_id, position, scheduled, scheduler_output, later):
                        slots[request_id] = self._state_slots(request_id, position + scheduled)
            if any(slots.values()):
                self._workers(kv_access.read_states_after_loads, slots)
            result = execute(scheduler_output, *args, **kwargs)
            shards = self._workers(kv_access.take_states) if any(slots.values()) else []
            states.update({request_id: [shard[request_id] for shard in shards] for request_id in later})
            return result

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            result = sample(*args, **kwargs)
            for request_id, tokens in later.items():  # the draft model's KV is computed after sampling
                self.snapshots[request_id] = self._read(request_id, tokens, states.pop(request_id))
            return result

        executor.execute_model, executor.sample_tokens = execute_model, sample_tokens

    def _before_step(
        self, request_id: str, position: int, scheduled: int, scheduler_output: Any, later: dict[str, int]
    ) -> bool:
        """Count the tokens that the step computes.

        Take a snapshot now, or note in `later` that it is taken after the step. Returns whether the request's
        load happens inside the step. Its state is then loaded to the slot that the step itself reads and
        writes: vLLM has copied states to such slots before (v1/worker/mamba_utils.py, preprocess_mamba).
        """
        trace, prompt = self.traces[request_id], self.scheduler.requests[request_id].num_prompt_tokens
        if position >= prompt:
            return False
        first = self._note_computed(trace, prompt, position, scheduled)
        if first and request_id in self.oracles and trace.external_tokens:
            self._write(request_id, self.oracles[request_id], position)
            self._keep_from_zeroing(request_id, scheduler_output)
        if request_id not in self.watched:
            return False
        if self.spec.role == "P":
            if position + scheduled >= prompt:
                later[request_id] = prompt  # the whole prompt's KV, before a block of it can be freed
        elif first and scheduler_output.has_sync_kv_loads and request_id not in self.oracles:
            later[request_id] = position
            return True
        elif first:
            self.snapshots[request_id] = self._read(request_id, position)
        return False

    def _writable(self) -> set[int]:
        """Blocks that a load or a step may change.

        These are the blocks of requests, without those that they share through the prefix cache.
        """
        return {
            b
            for r in self.scheduler.requests
            for group, ids in zip(self.groups, self.manager.get_block_ids(r), strict=True)
            for b in ids[
                self.traces[r].local_tokens // group.block_size
                if group.kind == "attention" and r in self.traces
                else 0 :
            ]
            if b
        }

    def _keep_from_zeroing(self, request_id: str, scheduler_output: Any) -> None:
        """Keep the step from zeroing blocks that the oracle has just filled.

        vLLM does the same with blocks of an asynchronous load.
        """
        if scheduler_output.new_block_ids_to_zero:
            filled = {b for ids in self.manager.get_block_ids(request_id) for b in ids}
            scheduler_output.new_block_ids_to_zero = [
                b for b in scheduler_output.new_block_ids_to_zero if b not in filled
            ] or None

    # ---- reading and writing the KV cache ------------------------------------------------------------------

    def _digest(self) -> np.ndarray:
        return np.stack(self._workers(kv_access.digest))

    def _state_slots(self, request_id: str, tokens: int) -> dict[str, int]:
        """Layer -> the slot that holds its state after `tokens` tokens."""
        return {
            name: _slot(table, tokens, group.block_size)
            for group, table in zip(self.groups, self.manager.get_block_ids(request_id), strict=True)
            for name in group.layers
            if group.kind == "state"
        }

    def _read(self, request_id: str, tokens: int, states: Sequence[States] = ()) -> Snapshot:
        """Read the KV of the first `tokens` tokens. `states`: of each rank, if they were read before."""
        tables = tuple(tuple(ids) for ids in self.manager.get_block_ids(request_id))
        rows, present, state, on_d = {}, {}, {}, self.spec.role == "D"
        for name, slot in self._state_slots(request_id, tokens).items():
            of_ranks = [rank[name] for rank in states] or self._workers(kv_access.read_state, name, slot)
            state[name] = kv_access.join_state(of_ranks)
        for group, table in zip(self.groups, tables, strict=True):
            for name in group.layers:
                if group.kind != "state":
                    shards = self._workers(kv_access.read_rows, name, list(table))
                    rows[name] = kv_access.join_heads(shards, self._heads(name), on_d)[:tokens]
                    present[name] = np.repeat(np.array(table, dtype=int) != 0, group.block_size)[:tokens]
        changed: tuple[int, ...] = ()
        if on_d:
            differs = (self._digest() != self.watched[request_id]).any(axis=0)
            changed = tuple(int(b) for b in np.flatnonzero(differs) if int(b) not in self.held[request_id])
        return Snapshot(
            request=request_id,
            tokens=tokens,
            groups=self.groups,
            tables=tables,
            rows=rows,
            present=present,
            state=state,
            changed=changed,
        )

    def _write(self, request_id: str, oracle: Snapshot, position: int) -> None:
        """Put the oracle's KV of the tokens before `position` where vLLM's own block tables place it."""
        local = self.traces[request_id].local_tokens
        for group, table in zip(self.groups, self.manager.get_block_ids(request_id), strict=True):
            for name in group.layers:
                if group.kind == "state":
                    if position:
                        self._workers(
                            kv_access.write_state,
                            name,
                            _slot(table, position, group.block_size),
                            oracle.state[name],
                        )
                    continue
                first = local  # local hits are there already, in blocks that other requests may share
                while first < position and not table[first // group.block_size]:
                    first = (first // group.block_size + 1) * group.block_size
                if first < position:
                    self._workers(
                        kv_access.write_rows, name, list(table), first, oracle.rows[name][first:position]
                    )


def _slot(table: Any, tokens: int, block_size: int) -> int:
    """The block of a state group that holds the state after `tokens` tokens.

    With prefix caching off there is one block per request; otherwise (vLLM's mamba_cache_mode "align") a
    state stays in the block in which its last token lies, and the next step goes on from there, in the next
    block if that one is full.
    """
    return table[min((max(tokens, 1) - 1) // block_size, len(table) - 1)]


def hide_end(worker: Any, request_id: str) -> None:
    """Let vLLM not tell the worker half of this rank that a request has ended. vLLM passes the worker."""
    connector: Any = worker_half()
    if (hidden := vars(connector).get(HIDDEN)) is None:
        hidden = vars(connector)[HIDDEN] = set()
        around(connector, hook_of_ends(connector), lambda hook, ended: hook(ended - hidden))
    hidden.add(request_id)
