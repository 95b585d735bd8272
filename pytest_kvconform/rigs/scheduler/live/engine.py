"""`LiveEngine`: one engine of one rank with both halves of the connector, without a model."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from pytest_kvconform.rigs.bytes import pool_memory
from pytest_kvconform.rigs.bytes.layers import metadata
from pytest_kvconform.rigs.context import declared_addition
from pytest_kvconform.rigs.engine.messages import ON_D, ON_P
from pytest_kvconform.rigs.engine.process import positions_of
from pytest_kvconform.rigs.scheduler.live.clocks import set_ahead
from pytest_kvconform.rigs.scheduler.live.config import LiveSpec, for_rank, live_geometry
from pytest_kvconform.rigs.scheduler.live.memory import WordMemory
from pytest_kvconform.rigs.scheduler.live.reports import Reports
from pytest_kvconform.rigs.scheduler.live.sizes import sizes_of, sizes_of_process
from pytest_kvconform.rigs.scheduler.rig import BLOCK, Rig
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf
from pytest_kvconform.rigs.tap import around
from pytest_kvconform.rigs.vllm_setup.compat import defers_finalize, post_forward, pre_forward
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import window_of
from pytest_kvconform.rigs.vllm_setup.worker import forward_context

OWNERS = 251  # numbers of requests that words can tell apart
WAIT_S = 0.001  # after a step without tokens: transfers go on in the background


class LiveEngine:
    """One engine. A case calls its methods, from another process if need be: they take and return data.

    Attributes: `side`: the scheduler (Side); `half`: the worker half; `wrong`: sentences about loaded KV that
    is not what was computed; `compared`: tokens that were compared.
    """

    def __init__(self, rig: Rig, spec: LiveSpec, config: Any):
        self.rig, self.spec = rig, spec
        # Prompts are longer for a connector that loads long ones only.
        more = -(-declared_addition(rig.subject, BLOCK) // rig.host.spec.memory[spec.role].block)
        self.half = half = WorkerHalf(
            rig,
            spec.role,
            port=spec.port,
            longest=spec.longest + more,
            config=config,
            blocks=spec.first_block + spec.blocks * (2 + more) // 2,
            geometry=live_geometry(rig.geometry, spec),
        )
        for_rank(config, spec)
        half.construct()
        with pool_memory.pools_of(pool_memory.zeros):
            self.caches = half.allocate_kv_caches()
        half.register_kv_caches(self.caches)
        self.side = half.scheduler_side(spec.data_parallel_rank, spec.first_block)
        half.set_handshake_metadata(self.side)
        self.memory = WordMemory(half, self.caches, rig.host.spec.memory[spec.role].conv)
        self.owners: dict[str, int] = {}
        self.computed_by: dict[str, int] = {}  # request -> engine whose words a load must bring
        self.loads: dict[str, tuple[int, int]] = {}  # request -> tokens [first, end) that were announced
        self.wrong: list[str] = []
        self.compared = self._added = 0
        self._hoard: list[Any] = []
        self.beside: list[Callable[[float], contextlib.AbstractContextManager[None]]] = []
        reports = Reports(rig)
        self.side.worker = lambda output: reports.checked(self._work(output))
        self._watch_loads()

    # ---- what a case does ----------------------------------------------------------------------------------

    def add(
        self,
        prompt: Iterable[int],
        owner: int,
        params: Mapping[str, Any] | None = None,
        *,
        loads_from: int = 0,
        like: str = "",
        name: str = "",
        **more: Any,
    ) -> str:
        """Hand a request to the scheduler. Returns its id.

        `owner`: number of the prompt, the same on every engine. `loads_from`: the engine that has computed
        what a load brings. `like`: P's id of the request; D's differs in its last word, as in a deployment.
        `name`: the words before it; "": made here. `more`: of `Side.add`.
        """
        self._added += 1
        name = like.rpartition("-")[0] or name or f"cmpl-{self.side.name}-{self._added}"
        id = f"{name}-{ON_D if like else ON_P}"
        self.owners[id], self.computed_by[id] = owner % OWNERS, loads_from
        return self.side.add(prompt, params, id=id, **more)

    def step(self, times: int = 1, alone_s: float = 0.0) -> None:
        """Take steps of the engine. Other engines step meanwhile, but for the first seconds of each."""
        for _ in range(times):
            with contextlib.ExitStack() as stack:
                for stepping in self.beside:
                    stack.enter_context(stepping(alone_s))
                self.side.step()

    def ended(self, ids: Iterable[str]) -> bool:
        """Whether these requests have ended."""
        return all(id in self.side.results or self.side.status(id) == "gone" for id in ids)

    def finishes(self, ids: Iterable[str]) -> dict[str, str]:
        """Request -> its finish reason; "": it goes on."""
        results = self.side.results
        return {id: (results[id].finish or "") if id in results else "" for id in ids}

    def statuses(self) -> dict[str, str]:
        """Request that has not ended -> name of its status."""
        return {id: self.side.status(id) for id in self.side.unfinished_requests()}

    def params(self, id: str) -> dict[str, Any]:
        """kv_transfer_params of a request that has ended. Raises NotApplicable if there are none."""
        return self.side.kv_transfer_params(id)

    def announced(self, ids: Iterable[str]) -> dict[str, int]:
        """Request -> tokens that were loaded for it, as the connector announced them."""
        return {id: self.loads[id][1] - self.loads[id][0] if id in self.loads else 0 for id in ids}

    def verdict(self) -> tuple[list[str], int]:
        """Sentences about wrong KV, and the number of tokens that were compared."""
        return self.wrong, self.compared

    def leaks(self) -> tuple[str, ...]:
        """What is left when every request has ended: see `leaks.leaks`."""
        return self.side.leaks()

    def is_idle(self) -> bool:
        """Whether no request is left, also none whose blocks are kept, and nothing is to be pushed."""
        return not self.side.scheduler.has_requests()

    def kept(self) -> set[str]:
        """Requests that have ended and whose blocks are kept."""
        return set(self.side.delayed_free_requests())

    def evict_prefix_cache(self) -> None:
        """Let the engine forget what it computed. The connector is not notified."""
        self.side.evict_prefix_cache()

    def set_token_budget(self, tokens: int, each: int = 0) -> None:
        """Let a step compute at most this many tokens, and at most `each` of one prompt; 0: no such limit."""
        self.side.set_token_budget(tokens)
        self.side.scheduler.scheduler_config.long_prefill_token_threshold = each

    def preempt_for_another(self) -> str:
        """Take a step in which a running request needs blocks, and none is free but those of the last one.

        vLLM preempts the last one, whose id is returned. The other one writes into its blocks in this step.
        """
        manager, id = self.side.manager, str(self.side.scheduler.running[-1].request_id)
        pool, allocate = manager.block_pool, manager.allocate_slots

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.request_id != id and not self._hoard:
                self._hoard = pool.get_new_blocks(pool.get_num_free_blocks())
                return None
            return allocate(request, *args, **kwargs)

        manager.allocate_slots = allocate_slots
        try:
            self.side.step()
        finally:
            manager.allocate_slots = allocate
            pool.free_blocks(reversed(self._hoard))
            self._hoard = []
        return id

    def waits_for_frees(self) -> bool:
        """Whether has_pending_block_frees returned True last: vLLM preempts nothing then."""
        return any(call.result for call in self.side.calls_of("has_pending_block_frees")[-1:])

    def preempted(self) -> list[str]:
        """Requests that were preempted so far."""
        return [id for step in self.side.steps for id in step.preempted]

    def set_clock_ahead(self, seconds: float, monotonic: bool = False) -> None:
        """Let clocks of this process show another time: see clocks.py."""
        set_ahead(seconds, monotonic)

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call function(engine, *args) in the process of the engine."""
        return function(self, *args)

    def sizes(self) -> dict[str, int]:
        """What both halves of the connector remember, and what their process has open: see sizes.py."""
        gc.collect()
        halves = {"scheduler half": self.side.connector_state(), "worker half": vars(self.half.connector)}
        return sizes_of(halves) | sizes_of_process()

    def sleep(self) -> None:
        """Sleep, and lose all KV. Its addresses stay, as in vLLM."""
        self.half.sleep(self.side)
        self.memory.lose()

    def wake_up(self) -> None:
        """Wake up from it."""
        self.half.wake_up(self.side)

    def name(self) -> str:
        """Name of the engine."""
        return self.side.name

    def abort(self, id: str) -> None:
        """Abort a request."""
        self.side.abort(id)

    def forget(self) -> None:
        """Drop the records of the harness, so that only the connector's memory grows."""
        self.side.forget_records()
        del self.side.finished[:]
        for of_requests in (self.side.prompts, self.loads, self.computed_by):
            of_requests.clear()

    def close(self) -> None:
        """Let vLLM shut both halves down."""
        self.side.connector.shutdown()
        self.half.shutdown()

    # ---- a step of the worker ------------------------------------------------------------------------------

    def _watch_loads(self) -> None:
        connector = self.side.connector
        self._due: dict[str, tuple[int, int]] = {}

        def note_load(hook: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                span = (
                    (local := self.side.recorder.local_hits[request.request_id]),
                    local + num_external_tokens,
                )
                self.loads[request.request_id] = self._due[request.request_id] = span
            hook(request, blocks, num_external_tokens)

        around(connector, "update_state_after_alloc", note_load)

    def _work(self, output: Any) -> Any:
        """One step of the worker: vLLM's order of the hooks around the words. Returns KVConnectorOutput."""
        call, active, drafter = self.half.recorder.call, self.half.active, bool(self.spec.method)
        if output.new_block_ids_to_zero:
            self.memory.zero(np.array(output.new_block_ids_to_zero))
        if output.kv_cache_block_copies:
            self.memory.copy(*np.array(output.kv_cache_block_copies).T)
        if not output.total_num_scheduled_tokens:
            time.sleep(WAIT_S)
            return call("a step without tokens", active.no_forward, output).kv_connector_output
        parts = {
            id: (first, first + output.num_scheduled_tokens[id], self.side.blocks(id))
            for id, first in positions_of(output).items()
        }
        context = self._metadata(parts)
        if drafter and not defers_finalize(active):
            return self._step_with_drafter(output, parts, context)
        with forward_context(context, self.half.config, output.total_num_scheduled_tokens):
            call("the hooks before the forward", pre_forward, active, output)
            self._forward(parts, context)
            call("finish_forward", active.finish_forward)
        draft = (lambda: None) if drafter else None
        return call("the hooks after the forward", post_forward, active, output.finished_req_ids, draft)

    def _step_with_drafter(self, output: Any, parts: Any, context: Any) -> KVConnectorOutput | None:
        """The order of vLLM's first model runner when a drafter runs: `wait_for_save` comes after the results
        (v1/worker/gpu_model_runner.py: execute_model and sample_tokens).
        """
        call, runner = self.half.recorder.call, KVConnectorModelRunnerMixin
        tokens = output.total_num_scheduled_tokens
        self.half.call_hook("handle_preemptions", output.kv_connector_metadata)
        with forward_context(context, self.half.config, tokens), contextlib.ExitStack() as stack:
            hooks = runner.maybe_get_kv_connector_output(output, defer_finalize=True)
            reported = call("the hooks before the forward", stack.enter_context, hooks)
            self._forward(parts, context)
            call("the hooks after the forward", stack.close)
        call("wait_for_save", runner.finalize_kv_connector)
        return reported

    def _forward(self, parts: Any, context: Any) -> None:
        """Layer by layer: wait for the load, and write words. Loaded tokens are compared before."""
        half, states = self.half, self._states()
        for name in half.layers:
            if name not in states:
                half.call_hook("wait_for_layer_load", name)
        self._compare(parts)
        for name in half.layers:
            group = self._group_of[name]
            for id, (first, end, tables) in parts.items():
                table, size = np.array(tables[group]), self.side.group_sizes[group]
                if name in states:
                    if slot := _slot(table, end, size):
                        self.memory.write_slot(name, slot, self.owners[id], end, self.spec.engine)
                    continue
                tokens = np.arange(first, end)
                self.memory.write(name, table[tokens // size], tokens, self.owners[id], self.spec.engine)
            if name not in states:
                half.call_hook("save_kv_layer", name, self.caches[name], context[name])

    def _compare(self, parts: Any) -> None:
        """Compare what was loaded for requests that run for the first time after their load."""
        for id, (position, _, tables) in parts.items():
            if id not in self._due:
                continue
            first, end = self._due.pop(id)
            end = min(end, position)
            for name in self.half.layers if end > first else ():
                found = self._wrong(name, id, first, end, tables)
                if found:
                    self.wrong.append(f"after the load of {id} (request {self.owners[id]}), {found}")
                    break
            self.compared += max(0, end - first)

    def _wrong(self, name: str, id: str, first: int, end: int, tables: Any) -> str:
        group = self._group_of[name]
        table, size = np.array(tables[group]), self.side.group_sizes[group]
        owner, engine = self.owners[id], self.computed_by[id]
        if name in self._states():
            slot = _slot(table, end, size)
            return self.memory.wrong_slot(name, slot, owner, end, engine) if slot else ""
        window = window_of(self.side.kv_config.kv_cache_groups[group].kv_cache_spec)
        tokens = np.arange(max(first, end - window + 1) if window else first, end)
        return self.memory.wrong_token(name, table[tokens // size], tokens, owner, engine)

    def _states(self) -> frozenset[str]:
        return frozenset(n for n, layer in self.half.layers.items() if isinstance(layer.spec, MambaSpec))

    @property
    def _group_of(self) -> dict[str, int]:
        groups = self.side.kv_config.kv_cache_groups
        return {name: index for index, group in enumerate(groups) for name in group.layer_names}

    def _metadata(self, parts: Any) -> dict[str, Any]:
        """Layer name -> attention metadata of this step."""
        made = {}
        for name, layer in self.half.layers.items():
            group = self._group_of[name]
            size, slots = self.side.group_sizes[group], [np.zeros(0, dtype=np.int64)]
            for first, end, tables in parts.values() if name not in self._states() else ():
                tokens, table = np.arange(first, end), np.array(tables[group])
                slots.append(table[tokens // size] * size + tokens % size)
            made[name] = metadata(layer.spec, np.concatenate(slots))
        return made


def _slot(table: np.ndarray, tokens: int, size: int) -> int:
    """The block that holds the state after `tokens` tokens, 0: none. Blocks of speculation come after it."""
    return int(table[min((max(tokens, 1) - 1) // size, len(table) - 1)]) if len(table) else 0
