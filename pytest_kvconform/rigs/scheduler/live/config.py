"""The vLLM configuration of a live engine."""

from __future__ import annotations

import copy
import dataclasses
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from model_matrix.geometries import Geometry, expand_layers
from pytest_kvconform.rigs.bytes.specs import over_tcp
from pytest_kvconform.rigs.scheduler.fake_connector import with_fake_connector
from pytest_kvconform.rigs.scheduler.worker_half import few_layers, single_rank_config

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Rig

SEQUENCES = 64  # requests that may run at once


@dataclass(frozen=True)
class LiveSpec:
    """How one live engine is built."""

    role: str  # "P" or "D"
    engine: int = 0  # 0 or 1: the number in the words that it computes
    port: int = 0  # number of its side channel's port
    blocks: int = 160  # of the pool
    longest: int = 8  # blocks of a request
    first_block: int = 0  # the block id below those that it may use
    both: bool = False  # kv_role is kv_both
    speculates: int = 0  # tokens that a draft model proposes; 0: no speculation
    finalize_late: bool = False  # wait_for_save after the results, as with a drafter
    policy: str = "fail"  # kv_load_failure_policy
    fake: str = ""  # "first", "last": where a fake connector is beside the subject in MultiConnector
    data_parallel_rank: int = 0
    data_parallel_size: int = 1


def read_with_help() -> None:
    """Let NIXL of the engines that this case will start read with the help of the peer, on a CPU.

    Each case has a process of its own.
    """
    from vllm.platforms import current_platform

    if current_platform.device_type == "cpu":
        os.environ |= over_tcp("cpu")


def live_config(rig: Rig, spec: LiveSpec) -> Any:
    """A VllmConfig of one rank. What belongs to a case is the same for every process that it forks."""
    config = single_rank_config(rig, spec.role)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_seqs = SEQUENCES
    config.kv_transfer_config.kv_load_failure_policy = spec.policy
    if spec.both:
        config.kv_transfer_config.kv_role = "kv_both"
    if spec.fake:
        config.kv_transfer_config = with_fake_connector(spec.fake)(config.kv_transfer_config)
    if spec.speculates:
        config.speculative_config = _draft_model(spec.speculates)
    return with_few_layers(config, rig.geometry)


def with_few_layers(config: Any, geometry: Geometry) -> Any:
    """Let the model of a configuration have no more layers than `few_layers` leaves."""
    count = len(expand_layers(few_layers(geometry))) - len(_draft(geometry))
    config.model_config = model = copy.copy(config.model_config)
    model.hf_config = copy.deepcopy(model.hf_config)
    model.hf_text_config = model.hf_config.get_text_config()
    model.hf_text_config.num_hidden_layers = count
    if kinds := getattr(model.hf_text_config, "layer_types", None):
        model.hf_text_config.layer_types = kinds[:count]
    model.model_arch_config = copy.copy(model.model_arch_config)
    model.model_arch_config.total_num_hidden_layers = count
    return config


def for_rank(config: Any, spec: LiveSpec) -> None:
    """Make a configuration that of one of several data-parallel ranks (EngineCoreProc.run_engine_core).

    To be called when process groups are there: a live engine joins no group with its fellow ranks.
    """
    if spec.data_parallel_size > 1:
        parallel, transfer = config.parallel_config, config.kv_transfer_config
        parallel.data_parallel_size, parallel.data_parallel_rank_local = spec.data_parallel_size, 0
        parallel.data_parallel_rank = parallel.data_parallel_index = spec.data_parallel_rank
        transfer.engine_id = f"{transfer.engine_id}_dp{spec.data_parallel_rank}"


def forward_context(metadata: Any, config: Any, output: Any) -> AbstractContextManager[None]:
    """vLLM's forward context of a step, as if every data-parallel rank computed as many tokens as this one.

    For models with experts vLLM otherwise asks the other ranks, which are not there.
    """
    from vllm.forward_context import set_forward_context

    tokens = output.total_num_scheduled_tokens
    of_ranks = torch.full((config.parallel_config.data_parallel_size,), tokens, dtype=torch.int32)
    return set_forward_context(metadata, config, tokens, of_ranks)


def _draft(geometry: Geometry) -> list[Any]:
    return [layer for layer in expand_layers(geometry) if layer.draft]


def _draft_model(tokens: int) -> Any:
    """A SpeculativeConfig of a draft model that is not there: the scheduler reads its numbers alone."""
    from vllm.config import SpeculativeConfig

    made = object.__new__(SpeculativeConfig)
    for field in dataclasses.fields(SpeculativeConfig):
        if field.default is not dataclasses.MISSING:
            value: Any = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            value = None
        object.__setattr__(made, field.name, value)
    made.method, made.num_speculative_tokens = "draft_model", tokens
    return made
