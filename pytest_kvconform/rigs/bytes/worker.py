"""One rank of a byte engine: vLLM's worker with a real connector and no model.

In place of a model the worker writes words for every scheduled token, where vLLM's own kernels would put that
token's KV. The words name the token they belong to. The connector's worker half is made, registered and
called by vLLM's own code (v1/worker/gpu/kv_connector.py), in the order of v1/worker/gpu/model_runner.py.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from pytest_kvconform.kvspace.pools.regions import Region, token_parts
from pytest_kvconform.rigs.bytes.checks import Groups, PoolChecker
from pytest_kvconform.rigs.bytes.forward import FirstRunner, Forward
from pytest_kvconform.rigs.bytes.layers import Layer, make_layers, specs_of_layers
from pytest_kvconform.rigs.bytes.memory import Memory, regions_of
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec, Check, StepWork
from pytest_kvconform.rigs.bytes.pool_memory import poison, pools_of
from pytest_kvconform.rigs.bytes.specs import geometry_of
from pytest_kvconform.rigs.vllm_setup import overrides
from pytest_kvconform.rigs.vllm_setup.compat import defers_finalize, post_forward, select_common_block_size
from pytest_kvconform.rigs.vllm_setup.engine_config import adopt_kv_cache_config, be_data_parallel
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import window_of, zeroed_layers
from pytest_kvconform.rigs.vllm_setup.worker import (
    allocate_kv_caches,
    build_worker_half,
    join_process_groups,
    place_of_rank,
    shut_worker_half_down,
    worker_half,
)

WARM_UP_S = 0.01  # vLLM's takes seconds
PLENTY = 1 << 44  # bytes: the pool's size is given in blocks
spec_of_process: ByteEngineSpec | None = None  # set by the engine before ranks are forked


class ByteWorker(WorkerBase):
    """vLLM makes it by its name (`worker_cls`) and drives it as it drives its own workers."""

    def init_device(self) -> None:
        assert spec_of_process is not None
        self.spec, self.geometry = spec_of_process, geometry_of(spec_of_process)
        self.device = torch.device(self.spec.device)
        if self.device.type == "cuda":  # ranks share GPUs where there are more ranks than GPUs
            overrides.communicate_without_devices()
            self.local_rank %= torch.cuda.device_count() or 1
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
        join_process_groups(self.vllm_config, self.rank, self.distributed_init_method, self.local_rank)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if self.spec.data_parallel[1] > 1:  # process groups are there: it joins none of its fellow ranks
            be_data_parallel(self.vllm_config.parallel_config, *self.spec.data_parallel)
        self.layers: dict[str, Layer] = make_layers(self.geometry, self.spec, self.vllm_config)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return specs_of_layers(self.layers, self.geometry, self.spec, self.vllm_config)

    def determine_available_memory(self) -> int:
        return PLENTY

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the connector, then the KV cache, then register it, as vLLM's workers do."""
        adopt_kv_cache_config(self.cache_config, kv_cache_config)
        build_worker_half(self.vllm_config, kv_cache_config)
        engine = int(self.spec.role != "P")
        with pools_of(lambda size: poison(size, engine)) as poisoned:
            kernel_blocks = self.kernel_blocks(kv_cache_config)
            caches = allocate_kv_caches(self.cache_config, kv_cache_config, self.device, kernel_blocks)
        self.config, self.caches = kv_cache_config, {name: caches[name] for name in self.layers}
        for name, layer in self.layers.items():
            layer.bind_kv_cache(caches[name])
        regions = regions_of(
            self.geometry,
            self.caches,
            {name: layer.backend.get_name() for name, layer in self.layers.items()},
            kv_cache_config.num_blocks,
            self.spec.tensor_parallel,
            self.rank,
            self.spec.conv_layout,
        )
        memory = Memory(self.caches, kv_cache_config.num_blocks, regions, engine, self.rank, bool(poisoned))
        if self.spec.first_block:
            memory.leave_out(self.spec.first_block)
        groups = kv_cache_config.kv_cache_groups
        of = {
            name: index
            for index, group in enumerate(groups)
            for name in group.layer_names
            if name in self.layers
        }
        self.groups = Groups(
            layers=tuple(tuple(group.layer_names) for group in groups),
            block_sizes=tuple(group.kv_cache_spec.block_size for group in groups),
            states=frozenset(
                name for name, layer in self.layers.items() if isinstance(layer.spec, MambaSpec)
            ),
            windows={name: window_of(groups[of[name]].kv_cache_spec) for name in self.layers},
            of={name: of[name] for name in self.layers},
            zeroed=zeroed_layers(kv_cache_config),
        )
        self.memory, self.checker = memory, PoolChecker(memory, self.groups, self.spec.store)
        self.connector = ActiveKVConnector(self.vllm_config, caches)
        self._sampled: list[ModelRunnerOutput] = []  # steps in flight
        first = self.spec.speculation and not defers_finalize(self.connector)
        self.runner = FirstRunner(self.connector) if first else self.connector
        self.forward = Forward(self.vllm_config, self.runner, self.layers, self.caches, self.checker)

    def kernel_blocks(self, config: Any) -> list[int]:
        """Tokens of a kernel block per group, as in `prepare_kernel_block_sizes` (v1/worker/utils.py)."""
        packed = any(tensor.block_stride > tensor.layer_stride for tensor in config.kv_cache_tensors)
        sizes = []
        for group in config.kv_cache_groups:
            size, mine = group.kv_cache_spec.block_size, [self.layers[name] for name in group.layer_names]
            if packed or isinstance(mine[0].spec, MambaSpec):
                sizes.append(size)
            else:
                sizes.append(
                    select_common_block_size(
                        size, [layer.backend for layer in mine], [layer.spec for layer in mine]
                    )
                )
        return sizes

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        found = worker_half().get_handshake_metadata()
        return None if found is None else {place_of_rank(): found}

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """What the connector sees of vLLM's warm-up and of the capture of CUDA graphs.

        The connector is not there while dummy steps run (v1/worker/gpu/warmup.py; model_runner.py:
        _dummy_run, capture_model). Capture changes the state of a worker, which it resets in the end.
        """
        self.connector.set_disabled(True)
        self.connector.no_forward(SchedulerOutput.make_empty())
        time.sleep(WARM_UP_S)
        self.connector.set_disabled(False)
        self.connector.reset_capture_state()
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def shutdown(self) -> None:
        shut_worker_half_down()
        del self.connector, self.runner, self.forward  # the connector is collected now, as in vLLM's workers

    # ---- a step --------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any) -> Any:
        """One step: vLLM's order of the connector's hooks around the writes."""
        work: StepWork = scheduler_output.byte_work
        if scheduler_output.new_block_ids_to_zero:
            self.memory.zero(np.array(scheduler_output.new_block_ids_to_zero))
        if scheduler_output.kv_cache_block_copies:
            self.memory.copy(*np.array(scheduler_output.kv_cache_block_copies).T)
        if not scheduler_output.total_num_scheduled_tokens:
            output = self.connector.no_forward(scheduler_output)
            self._note_failures(output.kv_connector_output)
            return output
        checker, before = self.checker, len(self.checker.checks)
        self.forward.run(scheduler_output, work)
        output = post_forward(self.runner, scheduler_output.finished_req_ids, self.forward.draft)
        self._note_failures(output)
        # loads within the step report failures only now
        for index, load in enumerate(work.load_checks, before):
            failed = checker.failed & set(load.loaded.tolist())
            checker.checks[index] = replace(checker.checks[index], failed=tuple(sorted(failed)))
            checker.failed -= failed
        tokens = {part.request: part.tokens for part in work.parts}
        ids = list(scheduler_output.num_scheduled_tokens)
        self._drafts = {part.request: list(part.drafts) for part in work.parts}
        sampled = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[list(tokens[name]) for name in ids],
            prompt_logprobs_dict={},
            kv_connector_output=output,
        )
        if not self.spec.in_flight:
            return sampled
        self._sampled.append(sampled)
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        """What vLLM's EngineCore.step_with_batch_queue calls after a step that computes tokens."""
        return self._sampled.pop(0)

    def take_draft_token_ids(self) -> DraftTokenIds:
        """What the draft model proposes to verify in the next step."""
        return DraftTokenIds(list(self._drafts), list(self._drafts.values()))

    def _note_failures(self, output: Any) -> None:
        if output is not None:
            self.checker.failed |= set(output.invalid_block_ids or ())

    # ---- calls of the engine -------------------------------------------------------------------------------

    def kv_pop_checks(self, request: str) -> list[Check]:
        return self.checker.pop_checks(request)

    def kv_lose(self) -> None:
        """Lose all KV: the memory of an engine that has slept is zeros."""
        self.memory.zero(np.arange(1, self.memory.num_blocks))

    def kv_bring(self, tokens: np.ndarray, tables: list[np.ndarray], owner: int) -> None:
        """Write what a load of these tokens of attention layers brings from P. `tables`: by group."""
        parts = token_parts(tokens, np.full(len(tokens), owner))
        for name, group in self.groups.of.items():
            if name not in self.groups.states:
                memory, (region,) = self.memory, self.memory.regions[name]
                blocks = tables[group][tokens // self.groups.block_sizes[group]]
                memory.write_tokens((memory.storage,), region, blocks, tokens, parts, 0, self.rank)
                memory.flush(blocks)

    def kv_audit(self, groups: np.ndarray, loading: np.ndarray) -> Check:
        return self.checker.audit(groups, loading)

    def kv_poison(self, blocks: np.ndarray) -> None:
        self.memory.poison(blocks)

    def kv_accept(self, blocks: np.ndarray) -> None:
        self.memory.fetch(blocks)
        self.memory.accept(blocks)

    def kv_flip(self, layer: str, block: int, byte: int) -> None:
        """Corrupt one byte of the storage: for tests of the rig.

        `byte` counts within the block's rows of a layer.
        """
        view = self.memory.regions[layer][0].of(self.memory.storage)
        block = int(self.memory.expand(layer, np.array([block]))[0])
        at = tuple(int(index) for index in np.unravel_index(byte, view.shape[1:]))
        view[(block, *at)] ^= 0xFF

    def forget_failed_loads(self) -> None:
        """Forget blocks of loads that failed, where no check has looked at them."""
        self.checker.failed.clear()

    def kv_regions(self) -> tuple[Region, ...]:
        return tuple(self.checker.regions)

    def kv_layer_facts(self) -> dict[str, Any]:
        attention = [layer for name, layer in self.layers.items() if name not in self.groups.states]
        return {
            "states": self.groups.states,
            "backend": attention[0].backend.get_name(),
            "bytes": len(self.memory.storage),
            "connector": type(worker_half()).__name__,
        }
