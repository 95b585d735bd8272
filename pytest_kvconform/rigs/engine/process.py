"""An engine in a process of its own: vLLM's real EngineCore, driven one call at a time over a connection.

`EngineProcess` is what engines of all rigs have in common. vLLM's own code runs unchanged. The process
watches the hooks of the connector's scheduler half: what vLLM asked and what the connector answered.
Subclasses watch the executor's `execute_model`: what a step computes, and what the KV cache holds by then.
"""

from __future__ import annotations

import os
import random
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pytest_kvconform.case_outcome import MOST_CALLS
from pytest_kvconform.result import HookCall, Violation, message_of
from pytest_kvconform.rigs.engine import ends
from pytest_kvconform.rigs.engine.messages import (
    CONV_LAYOUT,
    EngineFacts,
    Group,
    Leftovers,
    Output,
    Request,
    Step,
    Trace,
    Usage,
)
from pytest_kvconform.rigs.history import Call, History, Recorder, history_of_rank, watch_rank
from pytest_kvconform.rigs.hook_calls import take_all
from pytest_kvconform.rigs.processes.stacks import stack_of
from pytest_kvconform.rigs.tap import around
from pytest_kvconform.rigs.vllm_setup.answers import params_at_router
from pytest_kvconform.rigs.vllm_setup.hooks import FINISHED
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import window_of
from pytest_kvconform.rigs.vllm_setup.overrides import release_cores

# pause after a step that computed nothing, so that a polling engine leaves the core to its peer
IDLE_S = 0.001


def serve(connection: Connection, spec: Any, kind: type[EngineProcess]) -> None:
    """Start an engine and answer calls (name, arguments) until the connection ends.

    An answer is ("ok", value) or ("error", type, message, frames, finding of a Violation); the first one
    answers the start.
    """
    try:
        engine = kind(spec)
        connection.send(("ok", engine.facts()))
    except Exception as error:
        traceback.print_exc()
        connection.send(_error(error))
        return
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        if name == "leave":
            engine.leave()
            return
        try:
            connection.send(("ok", getattr(engine, name)(*arguments)))  # pickled before a byte is sent
        except Exception as error:
            traceback.print_exc()
            connection.send(_error(error))


def _error(error: Exception) -> tuple[Any, ...]:
    finding = error.finding if isinstance(error, Violation) else None
    return "error", type(error).__name__, message_of(error), stack_of(error), finding


class EngineProcess:
    """One engine: it prefills, decodes, or both."""

    most_calls = MOST_CALLS  # of hooks that each half of the connector keeps
    timed: tuple[str, ...] = ()  # hooks of the worker half whose durations are kept
    recorder_class = Recorder  # of the scheduler half
    log_stats = False  # whether vLLM's scheduler makes statistics of each step

    def __init__(self, spec: Any):
        os.environ.update(spec.environment)
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        self.spec, self.config = spec, self._configure(spec)
        self.order = random.Random(spec.role)
        self.before, self.is_shut_down = ends.note_environment(), False
        self.core = EngineCore(self.config, Executor.get_class(self.config), log_stats=self.log_stats)
        self.scheduler: Any = self.core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.kv_config = self.manager.kv_cache_config
        self.traces: dict[str, Trace] = {}
        self.groups = self._groups()
        self._workers(release_cores)
        self._watch_connector()
        self._watch_steps()

    # ---- what a subclass defines ---------------------------------------------------------------------------

    def _configure(self, spec: Any) -> Any:
        """vLLM's configuration of a specification."""
        raise NotImplementedError

    def _prompt(self, request: Request) -> dict[str, Any]:
        """The fields of vLLM's EngineCoreRequest with the prompt."""
        return {"prompt_token_ids": list(request.tokens)}

    def _state_layers(self) -> frozenset[str]:
        """Names of the layers that keep a state."""
        raise NotImplementedError

    def _backend(self) -> str:
        """Name of the attention backend; "" if no layer has one."""
        raise NotImplementedError

    def _poison_blocks(self, blocks: list[int]) -> None:
        """Fill blocks with the poison of the rig."""
        raise NotImplementedError

    def _watch_steps(self) -> None:
        """Wrap the executor's `execute_model`."""
        raise NotImplementedError

    # ---- calls ---------------------------------------------------------------------------------------------

    def facts(self) -> EngineFacts:
        """What vLLM made of the specification: groups, block size, connector, layout, backend."""
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
            conv_layout=os.environ.get(CONV_LAYOUT, ""),
        )

    def add(self, request: Request) -> None:
        """Hand a request to the scheduler."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        sampling = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0.0,
            # No seed: on CPU vLLM raises for a seed where a prefill takes several steps (docs/findings.md).
            allowed_token_ids=list(request.allowed) or None,
            logprobs=-1,
            detokenize=False,
            ignore_eos=True,
            stop_token_ids=list(request.stop) or None,
            extra_args={"kv_transfer_params": request.kv_transfer_params}
            if request.kv_transfer_params
            else None,
        )
        self.traces[request.id] = Trace(id=request.id, prompt_tokens=len(request.tokens))
        self.core.add_request(
            *self.core.preprocess_add_request(
                EngineCoreRequest(
                    request_id=request.id,
                    mm_features=None,
                    sampling_params=sampling,
                    pooling_params=None,
                    arrival_time=time.time(),
                    lora_request=None,
                    cache_salt=request.salt or None,
                    data_parallel_rank=None,
                    **self._prompt(request),
                )
            )
        )

    def step(self, seconds: float) -> Step:
        """Run steps until one returns an output or computes a token, for `seconds` at most.

        At least one step runs.
        """
        deadline = time.monotonic() + seconds
        while True:
            outputs, executed = self.core.step_fn()
            self.core.post_step(executed)
            found = tuple(self._output(o) for batch in (outputs or {}).values() for o in batch.outputs)
            if found or executed or time.monotonic() >= deadline:
                return Step(outputs=found, computed=int(executed))
            time.sleep(IDLE_S)

    def abort(self, request_id: str) -> None:
        """Abort a request in whatever state it is."""
        self.core.abort_requests([request_id])

    def trace(self, request_id: str) -> Trace:
        """What the engine has done with a request's prompt so far."""
        trace = self.traces[request_id]
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            trace.status = request.status.name
        return trace

    def hook_calls(self) -> list[HookCall]:
        """The last calls of the connector's hooks in every process of the engine, since the last question."""
        return [*take_all(), *(call for calls in self._workers(take_all) for call in calls)]

    def histories(self) -> tuple[History, ...]:
        """What both halves of the connector have done: the scheduler half, then each rank."""
        return self.recorder.history(), *self._workers(history_of_rank)

    def budget(self, tokens: int, each: int = 0) -> None:
        """Let a step compute at most this many tokens, and at most `each` of one prompt.

        Longer prompts are prefilled in chunks. 0: the configured number, and no such limit.
        """
        self.scheduler.max_num_scheduled_tokens = tokens or self.spec.max_batched_tokens
        self.scheduler.scheduler_config.long_prefill_token_threshold = each

    def poison(self, keep_cache: bool = False) -> int:
        """Fill unowned blocks with poison, and shuffle the order in which the pool hands out blocks.

        The prefix cache is emptied first, unless `keep_cache`. So block ids of this engine are unrelated to
        ids of its peer, and KV of an earlier request cannot pass for KV that was handed over. Returns the
        number of blocks filled.
        """
        if not keep_cache:
            self.manager.reset_prefix_cache()
        pool = self.manager.block_pool
        queue = pool.free_block_queue
        free = queue.popleft_n(queue.num_free_blocks)
        unused = [block for block in free if block.block_hash is None]
        self.order.shuffle(unused)
        # cached blocks are evicted last
        queue.append_n(unused + [block for block in free if block.block_hash is not None])
        self._poison_blocks([block.block_id for block in unused])
        return len(unused)

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
            promised=tuple(
                sorted(r for r in self.scheduler.requests if (t := self.traces.get(r)) and t.keeps_for_others)
            ),
        )

    def shutdown(self) -> Leftovers:
        """Shut down as vLLM's EngineCore.shutdown does. Returns what the process still has."""
        self.is_shut_down = True
        return ends.shut_down(self, self.before)

    def leave(self) -> None:
        """Shut down, before the process ends."""
        if not self.is_shut_down:
            ends.end_core(self)

    def _groups(self) -> tuple[Group, ...]:
        """The KV cache groups that vLLM formed."""
        states, managers = self._state_layers(), self.manager.coordinator.single_type_managers
        return tuple(
            Group(
                kind="state" if group.layer_names[0] in states else "attention",
                block_size=manager.block_size,
                layers=tuple(group.layer_names),
                window=window_of(group.kv_cache_spec),
            )
            for group, manager in zip(self.kv_config.kv_cache_groups, managers, strict=True)
        )

    def _workers(self, function: Any, *args: Any) -> list[Any]:
        return self.core.model_executor.collective_rpc(function, args=args)

    def _output(self, output: Any) -> Output:
        lists = output.new_logprobs
        if (trace := self.traces.get(output.request_id)) is not None:
            trace.accepted += max(0, len(output.new_token_ids) - 1)
        return Output(
            id=output.request_id,
            tokens=tuple(output.new_token_ids),
            logprobs=tuple(
                values[1:][np.argsort(ids[1:])]  # entry 0 repeats the sampled token
                for ids, values in zip(lists.logprob_token_ids, lists.logprobs, strict=True)
            )
            if lists is not None
            else (),
            finish=str(output.finish_reason) if output.finish_reason is not None else None,
            kv_transfer_params=params_at_router(output.kv_transfer_params),
        )

    # ---- watching the connector's scheduler half -----------------------------------------------------------

    def _watch_connector(self) -> None:
        """Note in the traces what the connector answers to the hooks of its scheduler half."""
        connector = self.scheduler.connector
        self.recorder = self.recorder_class(self.spec.role, most=self.most_calls)
        self.recorder.watch(connector)
        self._workers(watch_rank, self.spec.role, self.most_calls, self.timed)
        around(connector, "update_state_after_alloc", self._allocated)
        for name in ("get_num_new_matched_tokens", *FINISHED):
            self.recorder.listeners[name] = self._note_answer

    def _allocated(self, hook: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._note_allocation(request, num_external_tokens)
        hook(request, blocks, num_external_tokens)

    def _note_answer(self, call: Call) -> None:
        trace = self.traces.get(call.request)
        if trace is None:
            return
        if call.hook in FINISHED:
            trace.delayed_free, trace.handed_over = call.result
            trace.status = call.arguments["status"]
        else:
            _, trace.asynchronous = call.result

    def _note_allocation(self, request: Any, num_external_tokens: int) -> None:
        """Note how many tokens of a request are loaded, and how many the engine's own prefix cache had."""
        trace = self.traces.get(request.request_id)
        if trace is not None and num_external_tokens:
            trace.external_tokens = num_external_tokens
            trace.local_tokens = self.recorder.local_hits[request.request_id]

    def _note_computed(self, trace: Trace, prompt: int, position: int, scheduled: int) -> bool:
        """Note which tokens of a prompt a step is about to compute. Returns whether they are its first."""
        first = trace.first_computed < 0
        if first:
            trace.first_computed = position
            if not trace.external_tokens:
                trace.local_tokens = position
        trace.computed_tokens += min(scheduled, prompt - position)
        trace.steps += 1
        return first


def positions_of(scheduler_output: Any) -> dict[str, int]:
    """Scheduled request -> tokens that were computed before the step."""
    positions = {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    positions.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return positions
