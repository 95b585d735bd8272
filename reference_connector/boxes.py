"""Boxes: a rank's KV memory, described as rectangles with named axes over bytes.

A **box** is one layer's KV, or one part of it, on one rank: a rectangle of *cells*. A cell is `width` bytes
that lie together and are never cut. The cell of token t of block b with coordinates (c0, c1, ...) lies at

    address + b * block_stride + t * token_stride
        + (c0 - axes[0].start) * axes[0].stride + (c1 - axes[1].start) * axes[1].stride + ...

and nothing else is needed to find it. Every layout (LBHNC, LBNHC, BLHNC, ...) is a choice of strides,
every split over tensor parallel ranks a choice of ranges. Coordinates are **absolute**: KV head 5 is head 5
of the model on whichever rank it lies. So plan.py compares boxes of two engines by intersecting ranges.

    attention    part "kv", axis head: a cell is [K | V] of one head for one token
    MLA          the same with a single head, which every rank holds
    state        a box for each part: "conv.q", "conv.k", "conv.v" with the axes channel and tap, and "ssm"
                 with the axis head. A state has no tokens; its boxes have one token in a block
    pages        of backends whose page is not heads x tokens (_is_page): a cell of the part "tile" holds a
                 whole block of one slot and all heads of the rank. It fits the same heads and block size only
    CPU_ATTN     K is transposed within a block, so a cell of the part "tile" holds all tokens of a block. The
                 parts "k" and "v" are the same bytes in small cells, for a peer with another block size

Boxes are what ranks publish to their peers: msgspec encodes them, about 150 bytes each.
`boxes_of` is the only function of this package that knows how vLLM lays out KV memory.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import msgspec

# Numbers that come from a peer are checked when they are decoded.
Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Heads = tuple[int, int, int]  # of a rank: the first one, the end, and how many all ranks hold


class Axis(msgspec.Struct, frozen=True, array_like=True):
    """One axis of a box: the coordinates start <= c < stop, of `whole` that all ranks hold together."""

    name: str  # "head", "channel", "tap" or "element"
    start: Offset
    stop: Offset
    whole: Offset
    stride: Offset  # bytes from one coordinate to the next


class Box(msgspec.Struct, frozen=True, array_like=True):
    """One layer's KV, or one part of it, in the memory of one rank."""

    layer: str  # vLLM's name of the layer; P and D agree on it
    part: str  # "kv"; "conv.q", "conv.k", "conv.v", "ssm", ...; "tile", "k", "v"
    element: str  # what the bytes mean, like "bfloat16" or "fp8_e4m3"; P and D must agree
    group: Offset  # index into this engine's KVCacheConfig.transfer_groups; P's and D's may differ
    address: Offset  # of the first cell of block 0
    num_blocks: Size  # kernel blocks in the pool, those of vLLM's null block included
    block_stride: Offset  # bytes from one kernel block to the next
    pieces: Size  # kernel blocks of one block id: id b is the kernel blocks b * pieces, b * pieces + 1, ...
    tokens: Size  # per kernel block
    unit: Size  # tokens per cell: 1, or for a tile all tokens of a kernel block
    token_stride: Offset  # bytes from one cell to that of the next token (the next unit)
    axes: tuple[Axis, ...]
    width: Size  # bytes of a cell


def boxes_of(
    vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any], tp_rank: int, tp_size: int
) -> tuple[Box, ...]:
    """The boxes of one rank, in the order of `kv_cache_config.transfer_groups` and of their layers.

    `kv_caches`: what vLLM hands to `register_kv_caches`: layer name -> view [kernel block, head, token,
    content] of the allocation; of a state int8 [block, 1, 1, bytes]. See `create_kv_cache_views` of
    v1/kv_cache_interface.py, and `bind_kv_cache` of model_executor/layers/mamba/abstract.py. A layer that
    uses another layer's KV has no box. Raises ValueError for a layer that boxes cannot describe.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, MLAAttentionSpec

    owners = {name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers}
    boxes: list[Box] = []
    for index, group in enumerate(kv_cache_config.transfer_groups):
        of_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in (name for name in group.layer_names if name in owners):
            spec, view = of_layer.get(name, group.kv_cache_spec), kv_caches.get(name)
            box = partial(Box, layer=name, group=index)
            if view is None:
                raise ValueError(f"vLLM registered no KV cache for layer {name} of group {index}.")
            if isinstance(spec, MambaSpec):
                rank, size = (0, 1) if spec.tp_replicated else (tp_rank, tp_size)
                boxes += _state_boxes(box, spec, view, rank, size)
            elif isinstance(spec, AttentionSpec) and spec.tokens_per_state == 1 and view.stride(3) == 1:
                here = view.shape[1] if spec.num_head_slots is None else spec.num_kv_heads
                most = 1 if isinstance(spec, MLAAttentionSpec) else spec.max_tp_shards
                heads = _heads(vllm_config, name, most, here, tp_rank, tp_size)
                pieces = view.shape[0] // kv_cache_config.num_blocks
                boxes += _attention_boxes(vllm_config, box, spec, view, heads, pieces)
            else:
                kind = f"{type(spec).__name__} with strides {view.stride()}"
                raise ValueError(f"Layer {name} has KV of type {kind}, which boxes cannot describe.")
    return tuple(boxes)


def _heads(vllm_config: Any, name: str, most: int | None, here: int, tp_rank: int, tp_size: int) -> Heads:
    """The KV heads of a rank. Of more ranks than heads, neighbours hold the same head.

    `most`: vLLM's `max_tp_shards`, or 1 for latent KV (Kimi Linear's spec in 0.31 does not say it). Without
    it a rank with one head asks the configuration how many there are: of the model, or of the draft model.
    """
    if most is not None:
        shards = min(most, tp_size)
    elif here > 1:
        shards = tp_size
    else:
        config, draft = vllm_config.model_config, vllm_config.speculative_config
        if draft is not None and draft.draft_model_config is not None and _is_draft(vllm_config, name):
            config = draft.draft_model_config
        shards = min(config.get_total_num_kv_heads(), tp_size)
    first = tp_rank * shards // tp_size * here
    return first, first + here, shards * here


def _is_draft(vllm_config: Any, name: str) -> bool:
    """Whether this is a draft layer. Not every model runner marks them; their numbers follow the model's."""
    layer = vllm_config.compilation_config.static_forward_context.get(name)
    numbers = [int(word) for word in name.split(".") if word.isdigit()]
    many = vllm_config.model_config.get_total_num_hidden_layers()
    return getattr(layer, "is_draft_layer", False) or any(number >= many for number in numbers[:1])


def _is_page(spec: Any) -> bool:
    """Whether a block is more than heads x tokens.

    K and V in slots of their own, with heads or scales in an order of the kernel (`customize_spec` of
    FlashInfer with NVFP4, ROCM_ATTN, ROCM_AITER_FA with the shuffled layout, and B12X); scales behind all
    tokens of a block (the indexers of DeepSeek V3.2, and DeepSeek V4).
    """
    return (
        spec.num_head_slots is not None
        or getattr(getattr(spec, "cache_role", None), "value", "") == "indexer"
        or getattr(spec, "model_version", None) is not None
        or spec.kv_quant_mode.name == "NVFP4_DS_MLA"
    )


def _attention_boxes(
    vllm_config: Any, box: partial[Box], spec: Any, view: Any, heads: Heads, pieces: int
) -> Iterator[Box]:
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    layer, cache_dtype = box.keywords["layer"], vllm_config.cache_config.cache_dtype
    backend = get_current_attn_backends(vllm_config, [layer])[0].get_name()
    size, address, (blocks, slots, tokens, content) = view.element_size(), view.data_ptr(), view.shape
    block, head, token = (stride * size for stride in view.stride()[:3])
    width, axis = content * size, Axis("head", *heads, head)
    element = cache_dtype if spec.kv_quant_mode else _name(spec.dtype)
    page = _is_page(spec)
    if not page and backend != "CPU_ATTN":
        if block == tokens * token:  # kernel blocks are contiguous: those of one block id are one block again
            blocks, block, tokens, pieces = blocks // pieces, block * pieces, tokens * pieces, 1
        box = partial(box, num_blocks=blocks, block_stride=block, tokens=tokens, pieces=pieces, unit=1)
        box = partial(box, part="kv", element=element, address=address)
        yield box(token_stride=token, axes=(axis,), width=width)
        return
    if token != width:
        raise ValueError(f"Layer {layer}: {backend} has nothing between the tokens of a block, and here is.")
    box = partial(box, num_blocks=blocks, block_stride=block, tokens=tokens, pieces=pieces)
    tile = partial(box, part="tile", address=address, unit=tokens, token_stride=0, width=tokens * width)
    if page:
        first, end, whole = heads
        ranks = Axis("rank", first // (end - first), end // (end - first), whole // (end - first), 0)
        yield tile(element=f"{element} of {backend}", axes=(ranks, Axis("slot", 0, slots, slots, head)))
        return
    # CPU_ATTN: [K | V] of a block and head, K as [element, token] and V as [token, element]. vLLM's Python
    # does not show this; the tests look at what the kernel writes. The AMX kernel packs K into tiles of its
    # own, which can only be copied as whole blocks.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(spec.dtype, tokens, spec.head_size, cache_dtype).removesuffix("16")  # vec16 is as vec
    element = f"{element} of CPU_ATTN {isa}"
    yield tile(element=element, axes=(axis,))
    if isa == "vec" and not spec.kv_quant_mode:
        row = spec.head_size * size
        inner = Axis("element", 0, spec.head_size, spec.head_size, tokens * size)
        box = partial(box, element=element, unit=1)
        yield box(part="k", address=address, token_stride=size, axes=(axis, inner), width=size)
        yield box(part="v", address=address + tokens * row, token_stride=row, axes=(axis,), width=row)


def _state_boxes(box: partial[Box], spec: Any, view: Any, rank: int, size: int) -> Iterator[Box]:
    """The parts of a state in the order of memory: the convolution's taps, then the matrix of each head.

    Channels of the convolution are [Q | K | V] (x, B, C of Mamba2), each of them sharded on its own.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    kind, layer = spec.mamba_type.name, box.keywords["layer"]
    if len(spec.shapes) != _STATES.get(kind):
        raise ValueError(f"Layer {layer} has {len(spec.shapes)} states of kind {kind}, which have no boxes.")
    box = partial(box, num_blocks=view.shape[0], block_stride=view.stride(0))
    box = partial(box, pieces=1, tokens=1, unit=1, token_stride=0)
    address, shapes = view.data_ptr(), list(zip(spec.shapes, spec.dtypes, strict=True))
    if kind != "LINEAR":
        (shape, dtype), *shapes = shapes
        width, at = dtype.itemsize, address
        if is_conv_state_dim_first():
            channels, taps = shape  # DS
            strides = (taps * width, width)
        else:
            taps, channels = shape  # SD
            strides = (width, channels * width)
        for part, number in _conv_parts(kind, channels, spec.shapes):
            channel = Axis("channel", rank * number, (rank + 1) * number, size * number, strides[0])
            axes = (channel, Axis("tap", 0, taps, taps, strides[1]))
            yield box(part=part, element=_name(dtype), address=at, axes=axes, width=width)
            at += number * strides[0]
        address += channels * taps * width
    for shape, dtype in shapes:
        width = math.prod(shape[1:]) * dtype.itemsize
        heads = Axis("head", rank * shape[0], (rank + 1) * shape[0], size * shape[0], width)
        yield box(part="ssm", element=_name(dtype), address=address, axes=(heads,), width=width)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# Kind of vLLM's MambaSpec -> number of its states.
_STATES = {"MAMBA1": 2, "MAMBA2": 2, "GDN_ATTN": 2, "SHORT_CONV": 1, "LINEAR": 1}


def _conv_parts(kind: str, channels: int, shapes: Any) -> list[tuple[str, int]]:
    """The parts of a convolution: (part, its channels on this rank)."""
    if kind not in ("MAMBA2", "GDN_ATTN"):
        return [("conv", channels)]
    values = shapes[1][0] * shapes[1][1]  # heads * size of a head
    others = (channels - values) // 2
    if kind == "MAMBA2":
        return [("conv.x", values), ("conv.b", others), ("conv.c", others)]
    return [("conv.q", others), ("conv.k", others), ("conv.v", values)]
