"""Functions that read and write one worker's KV cache in logical coordinates.

They run inside a worker, through `collective_rpc`.

Attention rows are arrays [token, head, plane, word] with plane 0 = K and 1 = V. Latent attention has one
head, which every rank holds, and one plane. A state is a tuple of segments [channel, ...]. The attention
backend decides where a token's words lie in memory (vLLM: v1/attention/backends/*.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from pytest_kvconform.rigs.tap import around
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import conv_state_layout
from pytest_kvconform.rigs.vllm_setup.worker import worker_half

# Every byte of an unowned block. As a number it is large and finite in each
# float format (bf16 and fp32: 1.3e7).
POISON = 0x4B


def layers(worker: Any) -> dict[str, Any]:
    """Layer name -> the layer object that holds its KV cache, in the order of vLLM's forward context."""
    context = worker.model_runner.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if hasattr(layer, "kv_cache")}


def is_latent(layer: Any) -> bool:
    """Whether the layer keeps one latent row per token, [block, token, word], instead of keys and values."""
    return not is_state(layer) and layer.kv_cache.dim() == 3


def blocks_of(layer: Any) -> Any:
    """The cache of an attention layer: [kernel block, head, token, word]."""
    return layer.kv_cache.unsqueeze(1) if is_latent(layer) else layer.kv_cache


def row_index(layer: Any) -> Any:
    """Where the words of a token lie in the content of one (block, head).

    A tensor [token, plane, word] of flat positions.

    The backend itself is asked: it stores keys and values that count up, in a scratch block. Backends pack [K
    | V] per token, or all K before all V, or transpose keys for their kernel (CPU_ATTN, by instruction set).
    vLLM has no interface that names the order.
    """
    if not hasattr(layer, "kv_row_index"):
        layer.kv_row_index = _rows_in_order(layer) if is_latent(layer) else _ask_backend(layer)
    return layer.kv_row_index


def _rows_in_order(layer: Any) -> Any:
    import torch

    tokens, width = layer.kv_cache.shape[1:]
    return torch.arange(tokens * width, device=layer.kv_cache.device).view(tokens, 1, width)


DIGIT = 128  # whole numbers below it are exact in every float format that a KV cache can have


def _ask_backend(layer: Any) -> Any:
    import torch

    cache = layer.kv_cache
    heads, tokens, width = cache.shape[1], cache.shape[2], cache.shape[3] // 2
    count = torch.arange(tokens * 2 * width, device=cache.device).view(tokens, 2, width)
    found = torch.zeros(tokens * 2 * width, dtype=torch.long, device=cache.device)
    slots, scale = torch.arange(tokens, device=cache.device), 1
    while scale <= count.numel():
        digit = (count // scale % DIGIT).to(cache.dtype)
        scratch = torch.full((1, *cache.shape[1:]), -1.0, dtype=cache.dtype, device=cache.device)
        key, value = (digit[:, plane, None].expand(tokens, heads, width).contiguous() for plane in (0, 1))
        layer.impl.do_kv_cache_update(layer, key, value, scratch, slots)
        found += scratch.view(heads, -1)[0].long() * scale
        scale *= DIGIT
    index = torch.empty_like(found)
    index[found] = torch.arange(len(found), device=cache.device)
    if not torch.equal(found.sort().values, count.flatten()):
        name = layer.get_attn_backend().get_name()
        raise RuntimeError(f"backend {name} does not store a token's KV as a permutation of its words")
    return index.view(tokens, 2, width)


def is_state(layer: Any) -> bool:
    """Whether the layer keeps a recurrent state per request instead of rows per token."""
    return isinstance(layer.kv_cache, (tuple, list))


def describe(worker: Any) -> dict[str, dict[str, Any]]:
    """Layer name -> what its cache is: kind, backend, KV heads of this rank, whether latent, of the draft."""
    drafts = getattr(getattr(worker.model_runner, "drafter", None), "_draft_attn_layer_names", ())
    return {
        name: {"kind": "state"}
        if is_state(layer)
        else {
            "kind": "attention",
            "backend": layer.get_attn_backend().get_name(),
            "heads": blocks_of(layer).shape[1],
            "latent": is_latent(layer),
            "draft": name in drafts,
        }
        for name, layer in layers(worker).items()
    }


def _words(tensor: Any) -> np.ndarray:
    """Raw words of a tensor: unsigned integers of its item size.

    So the comparison is exact, and NaN equals itself.
    """
    import torch

    kinds = {
        1: (torch.uint8, np.uint8),
        2: (torch.int16, np.uint16),
        4: (torch.int32, np.uint32),
        8: (torch.int64, np.uint64),
    }
    torch_type, numpy_type = kinds[tensor.element_size()]
    return tensor.contiguous().view(torch_type).cpu().numpy().view(numpy_type)


def read_rows(worker: Any, name: str, blocks: list[int]) -> np.ndarray:
    """Rows of the given logical blocks, in order: [token, head, plane, word], this rank's heads."""
    import torch

    layer = layers(worker)[name]
    ids = torch.tensor(_kernel_blocks(worker, name, blocks), device=layer.kv_cache.device)
    content = blocks_of(layer)[ids].flatten(2)
    # [block, head, token, ...] -> [token, head, ...]
    return _words(content[:, :, row_index(layer)].transpose(1, 2).flatten(0, 1))


def write_rows(worker: Any, name: str, blocks: list[int], first: int, rows: np.ndarray) -> None:
    """Write rows [token, head, plane, word] of all heads of the model into the given logical blocks.

    `first` is the offset of the first token.
    """
    import torch

    layer = layers(worker)[name]
    cache, index = blocks_of(layer), row_index(layer)
    mine = (
        torch.from_numpy(rows[:, my_heads(worker, cache.shape[1], rows.shape[1])].copy())
        .view(cache.dtype)
        .to(cache.device)
    )
    ids = _kernel_blocks(worker, name, blocks)
    for offset, row in enumerate(mine):
        block, slot = divmod(first + offset, cache.shape[2])
        cache[ids[block]].flatten(1)[:, index[slot]] = row


def my_heads(worker: Any, local: int, total: int) -> slice:
    """Which of the model's KV heads this rank holds.

    vLLM replicates heads when there are more ranks than heads.
    """
    rank, size = (
        worker.rank % worker.parallel_config.tensor_parallel_size,
        worker.parallel_config.tensor_parallel_size,
    )
    start = rank * local if size <= total else rank * total // size
    return slice(start, start + local)


def read_state(worker: Any, name: str, slot: int) -> tuple[np.ndarray, ...]:
    """This rank's share of the state in one slot.

    The segments of the convolution [channel, position] come first (Q, K, V), then the recurrent state.
    """
    layer = layers(worker)[name]
    conv, *recurrent = layer.kv_cache
    return (
        *(_words(part) for part in _segments(layer, conv[slot])),
        *(_words(tensor[slot]) for tensor in recurrent),
    )


def read_states_after_loads(worker: Any, slots: dict[str, dict[str, int]]) -> None:
    """Read states as soon as start_load_kv of the next step has returned. `take_states` returns them.

    Later is too late: the layers that read a state call no wait_for_layer_load (vLLM:
    model_executor/layers/attention/kv_transfer_utils.py, maybe_transfer_kv_layer), and write the next state
    to the same slot. `slots`: request -> layer -> slot.
    """
    if not hasattr(worker, "kvconform_slots"):
        around(worker_half(), "start_load_kv", partial(_read_states, worker))
    worker.kvconform_slots = slots


def _read_states(worker: Any, hook: Any, *args: Any, **kwargs: Any) -> None:
    hook(*args, **kwargs)
    slots, worker.kvconform_slots = worker.kvconform_slots, {}
    if slots:
        worker.kvconform_states = {
            request: {
                name: tuple(part.copy() for part in read_state(worker, name, slot))
                for name, slot in of_request.items()
            }
            for request, of_request in slots.items()
        }


def take_states(worker: Any) -> dict[str, dict[str, tuple[np.ndarray, ...]]]:
    """This rank's shares of the states that `read_states_after_loads` named: request -> layer -> state."""
    states: dict[str, dict[str, tuple[np.ndarray, ...]]] = worker.kvconform_states
    del worker.kvconform_states
    return states


def write_state(worker: Any, name: str, slot: int, state: tuple[np.ndarray, ...]) -> None:
    """Write this rank's share of a state of the whole model (`join_state`) into one slot."""
    import torch

    layer = layers(worker)[name]
    conv, *recurrent = layer.kv_cache
    rank = worker.rank % worker.parallel_config.tensor_parallel_size
    for target, whole in zip(
        [*_segments(layer, conv[slot]), *(tensor[slot] for tensor in recurrent)], state, strict=True
    ):
        mine = np.ascontiguousarray(whole[rank * len(target) : (rank + 1) * len(target)])
        target.copy_(torch.from_numpy(mine).view(target.dtype).to(target.device))


def _segments(layer: Any, conv: Any) -> list[Any]:
    """The convolution state of one slot as views [channel, position].

    There is one view per projection, since each projection is sharded by itself.

    Shapes: vllm/model_executor/layers/mamba/gdn; the order of the axes is vLLM's setting
    VLLM_SSM_CONV_STATE_LAYOUT.
    """
    channels_first = conv if conv_state_layout() == "DS" else conv.transpose(0, 1)
    if hasattr(layer, "key_dim"):  # Gated DeltaNet
        key, value = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    else:  # Kimi Delta Attention
        key = value = layer.local_projection_size
    return list(channels_first.split([key, key, value], dim=0))


def join_state(shards: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Shares of all ranks -> the state of the whole model, segment by segment along the channels."""
    return tuple(np.concatenate(parts, axis=0) for parts in zip(*shards, strict=True))


def join_heads(shards: list[np.ndarray], total: int, replicas: bool) -> np.ndarray:
    """Rows of all ranks -> rows with all `total` KV heads of the model.

    Of replicated heads, with `replicas`, all copies, the copies of a head side by side; else the first ones.
    """
    rows = np.concatenate(shards, axis=1)
    return rows if replicas else rows[:, :: rows.shape[1] // total]


def _kernel_blocks(worker: Any, name: str, blocks: list[int]) -> list[int]:
    """Logical block ids -> ids of the kernel blocks that make them up."""
    spec = specs(worker)[name]
    ratio = spec.block_size // blocks_of(layers(worker)[name]).shape[2]
    return [block * ratio + part for block in blocks for part in range(ratio)]


def specs(worker: Any) -> dict[str, Any]:
    """Layer name -> its KV cache spec."""
    found = {}
    for group in worker.model_runner.kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
            found[name] = inner[name] if inner else group.kv_cache_spec
    return found


def _pages(worker: Any) -> list[Any]:
    """Every region of the pool as raw bytes [block, byte].

    Layers of different groups share regions, so each address counts once.

    vLLM places layer l of block b at offset + l * layer_stride + b * block_stride of one allocation
    (v1/kv_cache_interface.py, KVCacheTensor): either a region per layer, or all layers of a block side by
    side in one region.
    """
    import torch

    config = worker.model_runner.kv_cache_config
    some = next(iter(layers(worker).values())).kv_cache
    storage = (some[0] if isinstance(some, (tuple, list)) else some).untyped_storage()
    sizes: dict[int, int] = {}  # base address of a region -> bytes of one block in it
    for tensor in config.kv_cache_tensors:
        region_per_layer = tensor.layer_stride >= config.num_blocks * tensor.block_stride
        for index in range(len(tensor.layers) if region_per_layer else 1):
            base = tensor.offset + index * tensor.layer_stride
            sizes[base] = max(sizes.get(base, 0), tensor.block_stride)
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return [
        raw.new_empty(0).set_(storage, base, (config.num_blocks, size), (size, 1))
        for base, size in sorted(sizes.items())
    ]


def poison(worker: Any, blocks: list[int]) -> int:
    """Fill whole blocks with the poison byte. Returns the number of bytes written."""
    import torch

    ids = torch.tensor(blocks, dtype=torch.long)
    for page in (pages := _pages(worker)):
        wide = page.view(torch.int64) if page.shape[1] % 8 == 0 else page  # eight times as fast
        wide.index_fill_(
            0, ids.to(page.device), int.from_bytes(bytes([POISON] * wide.element_size()), "little")
        )
    return sum(len(blocks) * page.shape[1] for page in pages)


def digest(worker: Any) -> np.ndarray:
    """One number per block, over all regions: a digest that changes with any byte of the block.

    Two contents of a block have the same number with negligible probability.
    """
    total: Any = 0
    for index, page in enumerate(_pages(worker)):
        data = page.cpu().numpy()
        width = data.shape[1] // 8 * 8
        words = np.ascontiguousarray(data[:, :width]).view(np.uint64)
        weights = np.arange(1, words.shape[1] * 2, 2, dtype=np.uint64) * np.uint64(2 * index + 1)
        total = total + words @ weights + data[:, width:].astype(np.uint64).sum(axis=1, dtype=np.uint64)
    return total
