"""From a cell of the byte rig to the specification of one of its engines."""

from __future__ import annotations

import math

import msgspec

from model_matrix import Geometry, Setup, Side, load_byte_matrices, load_geometries, parse_topology
from model_matrix.geometries import SlidingWindow, State, expand_layers
from model_matrix.variants import few_layers, speculating
from pytest_kvconform.kv_config import TURN_S, inside_multi_connector
from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.bytes.messages import PACKED, ByteEngineSpec
from pytest_kvconform.rigs.context import RunContext, lease_environment
from pytest_kvconform.rigs.processes.ports import free_port
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import block_size_of

# blocks beyond those that a transfer needs; different, so that no address fits both by accident
ROOM = {"P": 4, "D": 9}
PROPOSED = 5  # tokens of a draft, where an engine speculates otherwise than its geometry
KEEPING = 6  # times the blocks of a P that keeps some: engines that are full are started anew


def byte_engine_spec(
    context: RunContext,
    cell: Cell,
    role: str,
    longest: int,
    folder: str = "",
    lease_s: float = 0.0,
    policy: str = "",
    load_s: float = 0.0,
    turn_s: float = TURN_S,
    fake: str = "",
) -> ByteEngineSpec:
    """How one side of a cell is built, with room for `longest` tokens at once.

    `folder`, `lease_s`, `policy`, `load_s` and `turn_s`: see `rigs.context.transfer_config`. `fake`: as in
    `ByteEngineSpec`.
    """
    geometry, side = load_geometries()[cell.family], side_of(cell, role)
    blocks = needed_blocks(cell, role, longest)
    transfer = context.transfer_config(
        role,
        port=free_port(),
        folder=folder,
        lease_s=lease_s,
        policy=policy,
        load_s=load_s,
        turn_s=turn_s,
    )
    return ByteEngineSpec(
        role=role,
        geometry=geometry.id,
        tensor_parallel=dict(zip("PD", parse_topology(cell.topology), strict=True))[role],
        block_size=side.block,
        num_blocks=blocks * (KEEPING if role == "P" and cell in context.keeping else 1) + ROOM[role],
        max_model_len=longest,
        max_batched_tokens=2 * longest,
        kv_transfer_config=inside_multi_connector(transfer, fake) if fake else transfer,
        environment=context.engine_environment(role) | lease_environment(context.subject, lease_s),
        layout=side.layout,
        cache_dtype=side.dtype,
        conv_layout=side.conv,
        content=side.content,
        kernel_block=side.kernel,
        prefix_caching=side.prefix_caching,
        in_flight=side.in_flight,
        engine_arguments={} if side.hma else {"disable_hybrid_kv_cache_manager": True},
        device=context.facts.device,
        handover=context.subject.way,
        save_delay=context.subject.save_delay,
        store=context.subject.is_store,
        fake=fake,
    )


def ports_of(spec: ByteEngineSpec) -> list[int]:
    """The ports that an engine was given, each the first of PORTS_APART: kv_port, and the side channels'."""
    return [spec.kv_transfer_config["kv_port"], int(spec.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"])]


def geometry_of(spec: ByteEngineSpec) -> Geometry:
    """The geometry of an engine, with the layers, the drafts, the model and the dtype that it has instead."""
    geometry = load_geometries()[spec.geometry]
    if spec.few:
        geometry = few_layers(geometry)
    if spec.speculation:
        geometry = speculating(geometry, spec.speculation, PROPOSED)
    return msgspec.structs.replace(geometry, id=spec.model or geometry.id, dtype=spec.dtype or geometry.dtype)


def side_of(cell: Cell, role: str) -> Side:
    """How memory is laid out on one side of a cell."""
    setup: Setup = load_byte_matrices().setups[cell.setup]
    return setup.prefill if role == "P" else setup.decode


def zygotes(cell: Cell) -> int:
    """From how many zygotes P and D are forked."""
    return load_byte_matrices().setups[cell.setup].zygotes


def alike(cell: Cell) -> bool:
    """Whether D is like P: the same tensor parallel size, block size and memory layout."""
    p, d = parse_topology(cell.topology)
    return p == d and side_of(cell, "P") == side_of(cell, "D")


def block_size(cell: Cell, role: str) -> int:
    """Tokens a block of attention layers has on one side."""
    side = side_of(cell, role)
    tp = dict(zip("PD", parse_topology(cell.topology), strict=True))[role]
    kernel = side.kernel or (16 if side.content == PACKED else 32)
    return block_size_of(load_geometries()[cell.family], tp, side.block, side.dtype, kernel_block=kernel)


def dropped_tokens(cell: Cell, role: str) -> int:
    """Tokens at the end of a hit in its own prefix cache that an engine computes again all the same: a block
    if a draft reads the model's hidden states, which no cache has. Source: SpeculativeConfig.use_eagle
    (config/speculative.py) and KVCacheManager's `use_eagle`.
    """
    return block_size(cell, role) if load_geometries()[cell.family].speculation else 0


def needed_blocks(cell: Cell, role: str, longest: int) -> int:
    """Return how many blocks `longest` tokens need on one side of a cell."""
    return blocks_for(load_geometries()[cell.family], block_size(cell, role), longest)


def blocks_for(geometry: Geometry, size: int, tokens: int) -> int:
    """Blocks of `size` tokens that requests of so many tokens in all may hold, in all groups together.

    Counted as if vLLM gave every kind of layer groups as large as the rarest kind (v1/core/kv_cache_utils.py,
    `_get_kv_cache_groups_uniform_page_size`), which is never fewer groups than vLLM makes.
    """
    counts: dict[str, int] = {}
    for layer in expand_layers(geometry):
        if isinstance(layer.kind, SlidingWindow):
            kind = "window"
        else:
            kind = "state" if isinstance(layer.kind, State) else "full"
        counts[kind] = counts.get(kind, 0) + 1
    rarest = min(counts.values())
    return sum(math.ceil(count / rarest) for count in counts.values()) * (math.ceil(tokens / size) + 1)


def over_tcp(device: str) -> dict[str, str]:
    """The environment in which NIXL reads with the help of the peer, so that a process that is stopped holds
    reads up. Over shared memory NIXL copies what it has. On a CPU it is enough that the peer takes no steps:
    NIXL has no progress thread there. `device`: "cpu" or "cuda".
    """
    transports = "tcp,self,cuda_copy" if device == "cuda" else "tcp,self"
    return {"UCX_TLS": transports, "UCX_NET_DEVICES": "lo"}
