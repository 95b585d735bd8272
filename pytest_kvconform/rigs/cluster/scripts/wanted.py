"""How an engine of a case's script is built, as data."""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from model_matrix import load_geometries
from model_matrix.variants import few_layers
from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec
from pytest_kvconform.rigs.bytes.specs import byte_engine_spec, over_tcp, side_of
from pytest_kvconform.rigs.context import RunContext, declared_addition
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import block_size_of

BLOCK = 16  # tokens of the smallest block of the cells
SEQUENCES = 64  # requests that may run at once
STEP_TOKENS = 8192  # that a step may compute


@dataclass(frozen=True)
class Wanted:
    """One engine."""

    role: str  # "P" or "D"
    blocks: int = 160  # of the pool
    longest: int = 8  # blocks of a request
    first_block: int = 0  # the block id below those that it may use
    both: bool = False  # kv_role is kv_both
    method: str = ""  # how it speculates: see `ByteEngineSpec.speculation`
    policy: str = "fail"  # kv_load_failure_policy
    fake: str = ""  # "first", "last": where a fake connector is beside the subject in MultiConnector
    data_parallel: tuple[int, int] = (0, 1)  # its rank, of how many; all have one configuration and one port
    needs_help: bool = False  # NIXL reads with the help of its peer, on a CPU


def spec_of(
    wanted: Wanted, context: RunContext, cell: Cell, folder: str, first: ByteEngineSpec | None
) -> ByteEngineSpec:
    """The specification of an engine: one rank of the first layers of the cell's model.

    `first`: of the first data-parallel rank, if this is another one. Prompts, and so pools, are larger for a
    connector that loads long prompts only.
    """
    geometry, side = few_layers(load_geometries()[cell.family]), side_of(cell, wanted.role)
    size = block_size_of(geometry, 1, side.block, side.dtype)
    more = math.ceil(declared_addition(context.subject, BLOCK) / size)
    longest = (wanted.longest + more) * size
    spec = byte_engine_spec(
        context, cell, wanted.role, longest, folder, policy=wanted.policy, fake=wanted.fake
    )
    given = first or spec
    tcp = over_tcp("cpu") if wanted.needs_help and context.facts.device == "cpu" else {}
    return replace(
        spec,
        few=True,
        speculation=wanted.method,
        tensor_parallel=1,
        num_blocks=wanted.first_block + wanted.blocks * (2 + more) // 2 + 1,
        first_block=wanted.first_block,
        max_batched_tokens=STEP_TOKENS,
        max_seqs=SEQUENCES,
        data_parallel=wanted.data_parallel,
        kv_transfer_config=given.kv_transfer_config | _changes(wanted, given.kv_transfer_config),
        environment=given.environment | tcp,
    )


def _changes(wanted: Wanted, transfer: dict[str, Any]) -> dict[str, Any]:
    """Fields of the KVTransferConfig that are others."""
    found: dict[str, Any] = {"kv_role": "kv_both"} if wanted.both else {}
    rank, ranks = wanted.data_parallel
    if ranks > 1:
        whole = transfer.get("engine_id", "").rpartition("_dp")[0] or str(uuid.uuid4())
        found["engine_id"] = f"{whole}_dp{rank}"
    return found
