"""The vLLM configuration of a live engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model_matrix.geometries import Geometry
from model_matrix.variants import few_layers, speculating
from pytest_kvconform.rigs.bytes.specs import over_tcp
from pytest_kvconform.rigs.scheduler.fake_connector import with_fake_connector
from pytest_kvconform.rigs.vllm_setup.worker import device_type

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Rig

PROPOSED = 5  # tokens of a draft
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
    # how it speculates: "eagle3", with a draft model whose layer has KV, or "ngram", without; "": not at all
    method: str = ""
    policy: str = "fail"  # kv_load_failure_policy
    fake: str = ""  # "first", "last": where a fake connector is beside the subject in MultiConnector
    data_parallel_rank: int = 0
    data_parallel_size: int = 1


def read_with_help() -> None:
    """Let NIXL of the engines that this case will start read with the help of the peer, on a CPU.

    Each case has a process of its own.
    """
    if device_type() == "cpu":
        os.environ |= over_tcp("cpu")


def live_config(rig: Rig, spec: LiveSpec) -> Any:
    """A VllmConfig of one rank, of the geometry that `live_geometry` gives."""
    host, role = rig.host, {"kv_role": "kv_both"} if spec.both else {}
    config = host.single_rank_config(
        spec.role,
        live_geometry(rig.geometry, spec),
        host.transfer(spec.role, spec.policy) | role,
        max_seqs=SEQUENCES,
    )
    if spec.fake:
        config.kv_transfer_config = with_fake_connector(spec.fake)(config.kv_transfer_config)
    return config


def live_geometry(geometry: Geometry, spec: LiveSpec) -> Geometry:
    """The first layers of a model, and how the engine speculates."""
    few = few_layers(geometry)
    return speculating(few, spec.method, PROPOSED) if spec.method else few


def for_rank(config: Any, spec: LiveSpec) -> None:
    """Make a configuration that of one of several data-parallel ranks (EngineCoreProc.run_engine_core).

    To be called when process groups are there: a live engine joins no group with its fellow ranks.
    """
    if spec.data_parallel_size > 1:
        parallel, transfer = config.parallel_config, config.kv_transfer_config
        parallel.data_parallel_size, parallel.data_parallel_rank_local = spec.data_parallel_size, 0
        parallel.data_parallel_rank = parallel.data_parallel_index = spec.data_parallel_rank
        transfer.engine_id = f"{transfer.engine_id}_dp{spec.data_parallel_rank}"
