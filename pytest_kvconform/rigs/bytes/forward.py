"""What runs in place of a model's forward: writes of words, and vLLM's calls of layer hooks around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Runner

from pytest_kvconform.kvspace.pools.regions import token_parts
from pytest_kvconform.rigs.bytes.checks import PoolChecker
from pytest_kvconform.rigs.bytes.layers import Layer, metadata
from pytest_kvconform.rigs.bytes.looks import LayerLooks
from pytest_kvconform.rigs.bytes.messages import StepWork
from pytest_kvconform.rigs.vllm_setup.compat import pre_forward
from pytest_kvconform.rigs.vllm_setup.worker import forward_context, worker_half

Slots = list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # by group, see `_slots`


class FirstRunner:
    """The hooks of a step that computes tokens as vLLM's first model runner calls them when a drafter runs:
    wait_for_save comes after the results (v1/worker/gpu_model_runner.py: execute_model and sample_tokens). It
    has the methods of ActiveKVConnector.
    """

    def __init__(self, connector: ActiveKVConnector):
        self.kv_connector = connector.kv_connector

    def pre_forward(self, scheduler_output: Any, input_batch: Any = None, **given: Any) -> None:
        self.kv_connector.handle_preemptions(scheduler_output.kv_connector_metadata)
        self._hooks = contextlib.ExitStack()
        self._reported = self._hooks.enter_context(
            Runner.maybe_get_kv_connector_output(scheduler_output, defer_finalize=True)
        )

    def finish_forward(self) -> None:
        self._hooks.close()

    def post_forward(self, finished: set[str]) -> Any:
        Runner.finalize_kv_connector()
        return self._reported


class Forward:
    """The forward of one rank."""

    def __init__(
        self,
        config: Any,
        connector: ActiveKVConnector | FirstRunner,
        layers: dict[str, Layer],
        caches: dict[str, torch.Tensor],
        checker: PoolChecker,
    ):
        """`config`: vLLM's VllmConfig; `caches`: of the layers, by name."""
        self.config, self.connector, self.layers, self.caches = config, connector, layers, caches
        self.checker, self.memory, self.groups = checker, checker.memory, checker.groups
        self.drafted = [name for name, layer in layers.items() if layer.is_draft_layer]
        # the draft model's forward of this step; None: there is no draft model
        self.draft: Callable[[], None] | None = None
        # asked of the class, as config/vllm.py does
        self.piecewise = type(worker_half()).requires_piecewise_for_cudagraph(
            config.kv_transfer_config.kv_connector_extra_config
        )

    def run(self, scheduler_output: Any, work: StepWork) -> None:
        """Run the model's forward of a step, from the start of its loads on."""
        self.draft = None
        slots = [self._slots(work, index) for index in range(len(self.groups.layers))]
        if work.replayed and not self.piecewise:
            self._replay(scheduler_output, work, slots)
        else:
            self._forward(scheduler_output, work, slots)

    def _forward(self, scheduler_output: Any, work: StepWork, slots: Slots) -> None:
        """A forward with the hooks of every layer, in the order of vLLM's attention layers: they write the KV
        of the tokens that they compute, then wait for the loaded KV of the layer, attend, and save the layer
        (`unified_kv_cache_update` and `maybe_transfer_kv_layer`).
        """
        states = [name for name in self.layers if name in self.groups.states]
        attention = [name for name in self.layers if name not in {*states, *self.drafted}]
        with forward_context(self._metadata(work), self.config, scheduler_output.total_num_scheduled_tokens):
            pre_forward(self.connector, scheduler_output)
            if work.load_checks and not work.after_load:
                self.checker.check_loads(work)
            looks = LayerLooks(self.memory, self.groups, work) if work.after_load else None
            if looks:  # no hook waits for a state
                looks.look(states)
            self._attend(attention, slots, looks)
            if not self.drafted:
                self._check_within(work, looks)
            for name in states:
                self._write_states(work, name)
            self.connector.finish_forward()
        if self.drafted:
            self.draft = lambda: self._draft(work, slots, looks)
        elif self.config.num_speculative_tokens:
            self.draft = lambda: None

    def _draft(self, work: StepWork, slots: Slots, looks: LayerLooks | None) -> None:
        """The layers of the draft model, whose forward has its own context (v1/worker/gpu/spec_decode)."""
        with forward_context(self._context, self.config, sum(part.end - part.first for part in work.parts)):
            self._attend(self.drafted, slots, looks)
        self._check_within(work, looks)

    def _attend(self, layers: Iterable[str], slots: Slots, looks: LayerLooks | None) -> None:
        group = worker_half()
        for name in layers:
            self._write_tokens(name, *slots[self.groups.of[name]])
            if group.has_connector_metadata():
                group.wait_for_layer_load(name)
            if looks:
                looks.look([name])
            if group.has_connector_metadata():
                group.save_kv_layer(name, self.caches[name], self._context[name])

    def _check_within(self, work: StepWork, looks: LayerLooks | None) -> None:
        """Compare loads that happen within the step with what each layer found."""
        if looks and work.load_checks:
            with self.memory.held_before(looks.seen()):
                self.checker.check_loads(work)

    def _replay(self, scheduler_output: Any, work: StepWork, slots: Slots) -> None:
        """A forward that is the replay of a full CUDA graph: no code of a layer runs, and so no hook of it.

        The connector begins loads outside of the forward context (v1/worker/gpu/model_runner.py).
        """
        pre_forward(self.connector, scheduler_output, attn_metadata=self._metadata(work))
        if work.load_checks:  # the whole forward reads what is loaded now
            looks = LayerLooks(self.memory, self.groups, work)
            looks.look(self.layers)
            with self.memory.held_before(looks.seen()):
                self.checker.check_loads(work)
        for name in self.layers:
            if name in self.groups.states:
                self._write_states(work, name)
            else:
                self._write_tokens(name, *slots[self.groups.of[name]])
        self.connector.finish_forward()

    def _slots(self, work: StepWork, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(block, position, share) of each scheduled token, unless its block is the null block.

        See `token_parts`.
        """
        if self.groups.is_state(group):
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing, nothing
        size = self.groups.block_sizes[group]
        tokens = [np.arange(part.first, part.end) for part in work.parts]
        blocks = np.concatenate(
            [part.tables[group][some // size] for part, some in zip(work.parts, tokens, strict=True)]
        )
        positions, owners = np.concatenate(tokens), np.concatenate([part.owners for part in work.parts])
        real = blocks != 0
        return blocks[real], positions[real], token_parts(positions[real], owners[real])

    def _metadata(self, work: StepWork) -> dict[str, Any]:
        """Layer name -> attention metadata of this step."""
        made: dict[Any, Any] = {}
        for name, group in self.groups.of.items():
            key = group, type(self.layers[name].spec)
            if key not in made:
                size = self.groups.block_sizes[group]
                slots = [np.zeros(0, dtype=np.int64)]
                for part in work.parts if not self.groups.is_state(group) else ():
                    tokens = np.arange(part.first, part.end)
                    slots.append(part.tables[group][tokens // size] * size + tokens % size)
                made[key] = metadata(self.layers[name].spec, np.concatenate(slots))
        self._context = {
            name: made[group, type(self.layers[name].spec)] for name, group in self.groups.of.items()
        }
        return self._context

    def _write_tokens(self, name: str, blocks: np.ndarray, tokens: np.ndarray, shares: np.ndarray) -> None:
        memory, (region,) = self.memory, self.memory.regions[name]
        memory.fetch(blocks)
        memory.write_tokens(
            (memory.storage, memory.shadow), region, blocks, tokens, shares, memory.engine, memory.rank
        )
        memory.flush(blocks)

    def _write_states(self, work: StepWork, name: str) -> None:
        memory, group = self.memory, self.groups.of[name]
        for part in work.parts:
            if slot := self.groups.state_slot(part.tables[group], part.end, group):
                self.memory.fetch(np.array([slot]))
                for region in memory.regions[name]:
                    memory.write_state(
                        (memory.storage, memory.shadow),
                        region,
                        slot,
                        int(part.owners[-1]),
                        part.end,
                        memory.engine,
                    )
                memory.flush(np.array([slot]))
