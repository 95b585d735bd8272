"""The inside of an engine's process: one real vLLM engine core, driven one call at a time over a connection.

vLLM's own code runs unchanged. The harness looks at it from three places: the connector's scheduler half (what it was asked and what it
answered), the moment before a step is executed (what is about to be computed, and what stands in the cache by then), and the KV cache
itself (`kv_access`).
"""

from __future__ import annotations

import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pytest_kvconform.rigs.engine import kv_access
from pytest_kvconform.rigs.engine.messages import (
    EngineFacts,
    Group,
    Leftovers,
    Output,
    Request,
    Snapshot,
    Step,
    Trace,
    Usage,
)
from pytest_kvconform.rigs.processes.linux import children_of, listening_sockets, thread_names
from pytest_kvconform.rigs.vllm_setup.engine_config import engine_config
from pytest_kvconform.rigs.vllm_setup.overrides import release_cores

IDLE_S = (
    0.001  # pause after a step that computed nothing, so that a polling engine leaves the core to its peer
)


def serve(connection: Connection, spec: Any, kind: Callable[[Any], Any] | None = None) -> None:
    """Start the engine and answer calls (name, arguments) with ("ok", value) or ("error", type, message) until the connection ends."""
    try:
        engine = (kind or EngineProcess)(spec)
        connection.send(("ok", engine.facts()))
    except Exception as error:
        traceback.print_exc()
        connection.send(("error", type(error).__name__, str(error)))
        return
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, ...] = ("ok", getattr(engine, name)(*arguments))
        except Exception as error:
            traceback.print_exc()
            answer = ("error", type(error).__name__, str(error))
        connection.send(answer)


class EngineProcess:
    """One engine: it prefills, decodes, or both."""

    def __init__(self, spec: Any):
        os.environ.update(spec.environment)
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        self.spec, self.config = spec, self._configure(spec)
        self.order = random.Random(spec.role)
        self._note_surroundings()
        self.core = EngineCore(self.config, Executor.get_class(self.config), log_stats=False)
        self.scheduler: Any = self.core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.kv_config = self.manager.kv_cache_config
        self.traces: dict[str, Trace] = {}
        self.watched: dict[str, np.ndarray] = {}  # request -> digest of every block when it was added
        self.held: dict[
            str, set[int]
        ] = {}  # watched request -> blocks that any request held since it was added
        self.snapshots: dict[str, Snapshot] = {}
        self.oracles: dict[str, Snapshot] = {}
        self.groups = self._groups()
        self._workers(release_cores)
        self._watch_connector()
        self._watch_steps()

    def _configure(self, spec: Any) -> Any:
        """The vLLM configuration of a specification."""
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
            more={"max_logprobs": -1} | spec.engine_arguments,
        )

    # ---- calls ----------------------------------------------------------------------------------------------------------------

    def facts(self) -> EngineFacts:
        """What vLLM made of the specification."""
        return EngineFacts(
            groups=self.groups,
            num_blocks=self.kv_config.num_blocks,
            block_size=self.scheduler.block_size,
            connector=type(self.scheduler.connector).__name__,
            layout=str(self.config.cache_config.kv_cache_layout),
            backend=self._backend(),
            hma=not self.config.scheduler_config.disable_hybrid_kv_cache_manager,
            prefix_caching=self.manager.enable_caching,
            pid=os.getpid(),
        )

    def _backend(self) -> str:
        """Name of the attention backend; "" if no layer has one."""
        layers = self._workers(kv_access.describe)[0]
        return next((d["backend"] for d in layers.values() if d["kind"] == "attention"), "")

    def add(self, request: Request) -> None:
        """Hand a request to the scheduler."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        sampling = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0.0 if request.seed is None else 1.0,
            seed=request.seed,
            logprobs=-1,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": request.kv_transfer_params}
            if request.kv_transfer_params
            else None,
        )
        self.traces[request.id] = Trace(id=request.id, prompt_tokens=len(request.tokens))
        if request.watch:
            self.watched[request.id] = self._digest() if self.spec.role == "D" else np.empty(0)
        if request.oracle is not None:
            self.oracles[request.id] = request.oracle
        self.core.add_request(
            *self.core.preprocess_add_request(
                EngineCoreRequest(
                    request_id=request.id,
                    prompt_token_ids=list(request.tokens),
                    mm_features=None,
                    sampling_params=sampling,
                    pooling_params=None,
                    arrival_time=time.time(),
                    lora_request=None,
                    cache_salt=request.salt or None,
                    data_parallel_rank=None,
                )
            )
        )

    def step(self, seconds: float) -> Step:
        """Run steps until one says something or computes something, at most for `seconds`; at least one."""
        deadline = time.monotonic() + seconds
        while True:
            outputs, executed = self.core.step_fn()
            self.core.post_step(executed)
            said = tuple(self._output(o) for batch in (outputs or {}).values() for o in batch.outputs)
            if said or executed or time.monotonic() >= deadline:
                return Step(outputs=said, computed=int(executed))
            time.sleep(IDLE_S)

    def abort(self, request_id: str) -> None:
        """Abort a request in whatever state it is."""
        self.core.abort_requests([request_id])

    def trace(self, request_id: str) -> Trace:
        """What was done with a request's prompt so far."""
        trace = self.traces[request_id]
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            trace.status = request.status.name
        return trace

    def budget(self, tokens: int) -> None:
        """Let a step compute at most this many tokens, so that longer prompts are prefilled in chunks; 0: as configured."""
        self.scheduler.max_num_scheduled_tokens = tokens or self.spec.max_batched_tokens

    def taken(self, request_id: str) -> Snapshot | None:
        """The snapshot of a watched request, taken before the first forward that read loaded KV; None if there was no such forward."""
        return self.snapshots.pop(request_id, None)

    def poison(self, keep_cache: bool = False) -> int:
        """Fill every block that nobody owns with the poison byte, and shuffle the order in which blocks are given out.

        Unless it is to be kept, the prefix cache is emptied first. After it no block id of this engine says anything about ids of its peer,
        and no KV of an earlier request can pass for one that was handed over. Returns the number of blocks filled.
        """
        if not keep_cache:
            self.manager.reset_prefix_cache()
        pool = self.manager.block_pool
        queue = pool.free_block_queue
        free = queue.popleft_n(queue.num_free_blocks)
        unused = [block for block in free if block.block_hash is None]
        self.order.shuffle(unused)
        queue.append_n(
            unused + [block for block in free if block.block_hash is not None]
        )  # cached blocks are evicted last
        self._poison_blocks([block.block_id for block in unused])
        return len(unused)

    def _poison_blocks(self, blocks: list[int]) -> None:
        self._workers(kv_access.poison, blocks)

    def usage(self) -> Usage:
        """What the engine holds now."""
        pool = self.manager.block_pool
        return Usage(
            free_blocks=pool.get_num_free_blocks(),
            total_blocks=pool.num_gpu_blocks - 1,
            requests=tuple(sorted(self.scheduler.requests)),
            group_requests=tuple(
                tuple(sorted(r for r, blocks in m.req_to_blocks.items() if blocks))
                for m in self.manager.coordinator.single_type_managers
            ),
            unfinished=self.scheduler.has_requests(),
        )

    def shutdown(self) -> Leftovers:
        """Shut down as vLLM's EngineCore.shutdown does, without its tour of the garbage collector; report what the process still has."""
        error = ""
        try:
            self.core.structured_output_manager.clear_backend()
            self.core.model_executor.shutdown()
            self.scheduler.shutdown()
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        threads, ports = self.before or (Counter(), frozenset())
        deadline = time.monotonic() + 2.0  # threads that were told to end may take a moment to do so
        while time.monotonic() < deadline and (thread_names() - threads or children_of(os.getpid())):
            time.sleep(0.02)
        return Leftovers(
            threads=tuple(sorted((thread_names() - threads).elements())),
            children=tuple(children_of(os.getpid())),
            error=error,
            listening=tuple(a for a in listening_sockets(os.getpid()) if a not in ports),
        )

    def _note_surroundings(self) -> None:
        """Remember threads and ports at the moment before the connector is built: what vLLM itself keeps is not the connector's to end."""
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        create, process = KVConnectorFactory.create_connector, os.getpid()
        self.before: tuple[Counter[str], frozenset[str]] | None = None

        def create_connector(*args: Any, **kwargs: Any) -> Any:
            if (
                self.before is None and os.getpid() == process
            ):  # a rank that was forked would note it for nobody
                self.before = thread_names(), frozenset(listening_sockets(os.getpid()))
            return create(*args, **kwargs)

        KVConnectorFactory.create_connector = create_connector

    def _groups(self) -> tuple[Group, ...]:
        kinds = self._workers(kv_access.describe)[0]
        return tuple(
            Group(
                kind=kinds[group.layer_names[0]]["kind"],
                block_size=manager.block_size,
                layers=tuple(group.layer_names),
                window=getattr(group.kv_cache_spec, "sliding_window", None) or 0,
            )
            for group, manager in zip(
                self.kv_config.kv_cache_groups, self.manager.coordinator.single_type_managers, strict=True
            )
        )

    # ---- looking --------------------------------------------------------------------------------------------------------------

    def _workers(self, function: Any, *args: Any) -> list[Any]:
        return self.core.model_executor.collective_rpc(function, args=args)

    def _digest(self) -> np.ndarray:
        return np.stack(self._workers(kv_access.digest))

    def _output(self, output: Any) -> Output:
        logprobs, lists = None, output.new_logprobs
        if lists is not None and len(lists.logprobs):
            ids, values = (
                lists.logprob_token_ids[0][1:],
                lists.logprobs[0][1:],
            )  # entry 0 repeats the sampled token
            order = np.argsort(ids)
            logprobs = (ids[order], values[order])
        return Output(
            id=output.request_id,
            token=output.new_token_ids[0] if output.new_token_ids else None,
            logprobs=logprobs,
            finish=str(output.finish_reason) if output.finish_reason is not None else None,
            kv_transfer_params=output.kv_transfer_params,
        )

    def _watch_connector(self) -> None:
        """Note what the connector's scheduler half answers, and keep it away from requests that the harness serves itself."""
        connector = self.scheduler.connector
        matched, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
            if request.request_id in self.oracles:
                return max(0, request.num_tokens - 1 - num_computed_tokens), False
            answer = matched(request, num_computed_tokens)
            if (trace := self.traces.get(request.request_id)) is not None:
                trace.asynchronous = bool(answer[1])
            return answer

        def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
            trace = self.traces.get(request.request_id)
            if trace is not None and num_external_tokens:
                trace.external_tokens, trace.local_tokens = (
                    num_external_tokens,
                    request.prefill_stats.num_local_cached_tokens,
                )
            if request.request_id not in self.oracles:
                allocated(request, blocks, num_external_tokens)

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        connector.update_state_after_alloc = update_state_after_alloc
        for name in ("request_finished", "request_finished_all_groups"):
            if (finished := getattr(connector, name, None)) is not None:
                setattr(connector, name, self._watched_end(finished))
        on_new_request = connector.on_new_request
        connector.on_new_request = lambda request: (
            None if request.request_id in self.oracles else on_new_request(request)
        )

    def _watched_end(self, finished: Any) -> Any:
        def request_finished(request: Any, block_ids: Any) -> Any:
            if request.request_id in self.oracles:
                return False, None
            answer = finished(request, block_ids)
            if (trace := self.traces.get(request.request_id)) is not None:
                trace.delayed_free, trace.handed_over = bool(answer[0]), bool(answer[1])
                trace.status = request.status.name
            return answer

        return request_finished

    def _watch_steps(self) -> None:
        execute = self.core.model_executor.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            positions = positions_of(scheduler_output)
            later: dict[str, int] = {}
            writable = self._writable()
            for request_id in self.watched:
                self.held.setdefault(request_id, set()).update(
                    writable
                )  # blocks of a neighbour that has ended by then, too
            for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
                if request_id in self.traces:
                    self._before_step(request_id, positions[request_id], scheduled, scheduler_output, later)
            result = execute(scheduler_output, *args, **kwargs)
            for request_id, tokens in later.items():
                self.snapshots[request_id] = self._read(request_id, tokens)
            return result

        self.core.model_executor.execute_model = execute_model

    def _before_step(
        self, request_id: str, position: int, scheduled: int, scheduler_output: Any, later: dict[str, int]
    ) -> None:
        """Count what is about to be computed. Look at the cache now, or note in `later` to look at it after the step."""
        trace, prompt = self.traces[request_id], self.scheduler.requests[request_id].num_prompt_tokens
        if position >= prompt:
            return
        first = self._count(trace, prompt, position, scheduled)
        if first and request_id in self.oracles and trace.external_tokens:
            self._write(request_id, self.oracles[request_id], position)
            self._spare_from_zeroing(request_id, scheduler_output)
        if request_id not in self.watched:
            return
        if self.spec.role == "P":
            if position + scheduled >= prompt:
                later[request_id] = prompt  # the whole prompt's KV, before anyone can free a block of it
        elif first and scheduler_output.has_sync_kv_loads and request_id not in self.oracles:
            later[request_id] = position  # a synchronous load happens inside the step
        elif first:
            self.snapshots[request_id] = self._read(request_id, position)

    def _count(self, trace: Trace, prompt: int, position: int, scheduled: int) -> bool:
        """Note which tokens of a prompt a step is about to compute. Returns whether they are its first."""
        first = trace.first_computed < 0
        if first:
            trace.first_computed = position
            if not trace.external_tokens:
                trace.local_tokens = position
        trace.computed_tokens += min(scheduled, prompt - position)
        trace.steps += 1
        return first

    def _writable(self) -> set[int]:
        """Blocks that a load or a step may change: those that requests hold, without the ones they share through the prefix cache."""
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

    def _spare_from_zeroing(self, request_id: str, scheduler_output: Any) -> None:
        """Blocks that the oracle has just filled are not to be zeroed by the step, as vLLM spares those of an asynchronous load."""
        if scheduler_output.new_block_ids_to_zero:
            filled = {b for ids in self.manager.get_block_ids(request_id) for b in ids}
            scheduler_output.new_block_ids_to_zero = [
                b for b in scheduler_output.new_block_ids_to_zero if b not in filled
            ] or None

    def _read(self, request_id: str, tokens: int) -> Snapshot:
        tables = tuple(tuple(ids) for ids in self.manager.get_block_ids(request_id))
        rows, present, state = {}, {}, {}
        for group, table in zip(self.groups, tables, strict=True):
            for name in group.layers:
                if group.kind == "state":
                    state[name] = kv_access.join_state(
                        self._workers(kv_access.read_state, name, _slot(table, tokens, group.block_size))
                    )
                else:
                    shards = self._workers(kv_access.read_rows, name, list(table))
                    rows[name] = kv_access.join_heads(shards, self._total_heads())[:tokens]
                    present[name] = np.repeat(np.array(table, dtype=int) != 0, group.block_size)[:tokens]
        changed: tuple[int, ...] = ()
        if self.spec.role == "D":
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

    def _total_heads(self) -> int:
        return self.config.model_config.get_total_num_kv_heads()

    def _write(self, request_id: str, oracle: Snapshot, position: int) -> None:
        """Put the oracle's KV of the tokens before `position` where vLLM's own block tables say it belongs."""
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
                first = local  # tokens hit locally stand there already, in blocks that others may share
                while first < position and not table[first // group.block_size]:
                    first = (first // group.block_size + 1) * group.block_size
                if first < position:
                    self._workers(
                        kv_access.write_rows, name, list(table), first, oracle.rows[name][first:position]
                    )


def positions_of(scheduler_output: Any) -> dict[str, int]:
    """Scheduled request -> tokens that were computed before the step."""
    positions = {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    positions.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return positions


def _slot(table: Any, tokens: int, block_size: int) -> int:
    """The block of a state group that holds the state after `tokens` tokens.

    With prefix caching off there is one block per request; otherwise (vLLM's mamba_cache_mode "align") a state stays in the block in
    which its last token lies, and the next step goes on from there, in the next block if that one is full.
    """
    return table[min((max(tokens, 1) - 1) // block_size, len(table) - 1)]
