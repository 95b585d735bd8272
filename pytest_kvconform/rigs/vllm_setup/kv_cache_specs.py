"""vLLM's KV cache specs of a geometry, as the model's layers make them, without building the model.

Sources in vLLM: `get_kv_cache_spec` of model_executor/layers/attention/attention.py, mla_attention.py and
layers/mamba/abstract.py; shapes of states from layers/mamba/mamba_utils.py; the block size of hybrids from
`_align_hybrid_block_size` of platforms/interface.py. tests/rigs compares the results with those of the models
themselves.

vLLM and torch are imported inside functions only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from model_matrix.geometries import Attention, Geometry, Kind, Mla, SlidingWindow, State, expand_layers
from pytest_kvconform.rigs.vllm_setup.compat import latent_shards

KERNEL_BLOCK = 32  # tokens: blocks of vLLM's attention kernels on CPU are multiples of it (CPU_ATTN, AMX_MLA)
# tokens: blocks of a model with latent attention and states are multiples of it, on every platform
MLA_HYBRID_BLOCK = 128
SEGMENTS = ("conv Q", "conv K", "conv V", "ssm")
# of a connector that is no SupportsHMA: vLLM then makes all layers of a model one kind, which states are not
NO_STATES = "does not inherit SupportsHMA, and without it vLLM starts no model with states"


def unified_in_vain(stack: Iterable[tuple[str, int, str]]) -> bool:
    """Whether vLLM raised because layers of a model cannot be made one kind.

    `stack`: (file, line, function) of each frame of the exception.
    """
    return any(function == "unify_hybrid_kv_cache_specs" for *_, function in stack)


def possible(geometry: Geometry, tp: int) -> str:
    """Why vLLM cannot run the model at tensor parallel size `tp`, as one sentence; "" if it can."""
    heads = geometry.config["num_attention_heads"]
    if heads % tp:
        return f"{geometry.id} has {heads} attention heads, which do not divide by {tp}."
    draft_heads = (geometry.draft_config or geometry.config)["num_attention_heads"]
    if draft_heads % tp:
        return f"The draft of {geometry.id} has {draft_heads} attention heads, which do not divide by {tp}."
    for word, kind in geometry.kinds.items():
        if isinstance(kind, State):
            for what, number in (("key", kind.key_heads), ("value", kind.value_heads)):
                if number % tp:
                    heads_of = f"Layers of kind {word!r} of {geometry.id} have {number} {what} heads"
                    return f"{heads_of}, which do not divide by {tp}."
        elif not isinstance(kind, Mla) and kind.kv_heads % tp and tp % kind.kv_heads:
            heads_of = f"Layers of kind {word!r} of {geometry.id} have {kind.kv_heads} KV heads"
            return f"{heads_of}, which neither divide by {tp} nor divide it."
    return ""


def kv_heads(kind: Attention, tp: int, rank: int) -> tuple[int, int]:
    """(first global KV head, number of KV heads) of one rank.

    With more ranks than heads, ranks next to each other hold the same head. Latent attention is one head that
    every rank holds.
    """
    if isinstance(kind, Mla):
        return 0, 1
    if kind.kv_heads >= tp:
        number = kind.kv_heads // tp
        return rank * number, number
    return rank // (tp // kind.kv_heads), 1


@dataclass(frozen=True)
class Segment:
    """Where the rows of one part of a state lie within a page of one rank.

    A row is a channel of the convolution, or one of the `head_v` rows of a head's matrix.

    Element e of row r is at `offset + r * row_stride + e * element_stride`. With layout SD a row of the
    convolution is not contiguous.
    """

    name: str
    number: int  # index into SEGMENTS
    rows: int  # on one rank
    elements: int  # of one row: kernel - 1, or head_k
    element_size: int  # bytes
    offset: int  # bytes from the start of the page
    row_stride: int  # bytes
    element_stride: int  # bytes

    def first(self, rank: int) -> int:
        """Global number, within the segment, of the rank's first row."""
        return rank * self.rows


def state_segments(
    geometry: Geometry, kind: State, tp: int, layout: Literal["DS", "SD"] = "DS"
) -> tuple[Segment, ...]:
    """The four parts of one rank's state in the order of memory.

    `layout` of the convolution: DS = (channel, token), SD = (token, channel), see VLLM_SSM_CONV_STATE_LAYOUT.
    Raises ValueError if the topology is impossible.
    """
    _check(geometry, tp)
    size, tokens = _size(kind.conv_dtype), kind.kernel - 1
    channels = [number // tp for number in kind.conv_channels]
    whole = sum(channels)
    segments, start = [], 0
    for number, rows in enumerate(channels):
        if layout == "DS":
            offset, row_stride, element_stride = start * tokens * size, tokens * size, size
        else:
            offset, row_stride, element_stride = start * size, size, whole * size
        segments.append(
            Segment(SEGMENTS[number], number, rows, tokens, size, offset, row_stride, element_stride)
        )
        start += rows
    rows, ssm_size = kind.value_heads // tp * kind.head_v, _size(kind.ssm_dtype)
    segments.append(
        Segment(
            SEGMENTS[3],
            3,
            rows,
            kind.head_k,
            ssm_size,
            whole * tokens * size,
            kind.head_k * ssm_size,
            ssm_size,
        )
    )
    return tuple(segments)


def block_size_of(
    geometry: Geometry, tp: int, wanted: int, cache_dtype: str = "auto", kernel_block: int = KERNEL_BLOCK
) -> int:
    """Tokens of a block of the attention layers when a user asks for `wanted`.

    For a model with states vLLM raises it until a block of KV is as large as a state.

    `kernel_block` is the smallest block of the attention kernels. The CPU platform also sets 16 for every
    model with latent attention if the machine has no AMX, whatever is asked for. That is the limit of a
    kernel, not of the geometry, and is left out here. Raises ValueError if the topology is impossible.
    """
    _check(geometry, tp)
    states = [kind for kind in geometry.kinds.values() if isinstance(kind, State)]
    if not states:
        return wanted
    attention = _main_attention(geometry)
    per_token = _bytes_per_token(attention, geometry, tp, cache_dtype)
    page = max(_state_bytes(geometry, kind, tp) for kind in states)
    alignment = max(kernel_block, wanted, MLA_HYBRID_BLOCK if isinstance(attention, Mla) else 0)
    derived = alignment * math.ceil(page / (alignment * per_token))
    return max(wanted, kernel_block * math.ceil(derived / kernel_block))


def layer_specs(
    geometry: Geometry,
    tp: int,
    block_size: int,
    cache_dtype: str = "auto",
    *,
    prefix_caching: bool = True,
    max_model_len: int = 4096,
    kernel_block: int = KERNEL_BLOCK,
    drafted: int = 0,
) -> dict[str, Any]:
    """Layer name -> KVCacheSpec of one rank, in the order of the model, the draft's layers last.

    `block_size`: tokens, what `block_size_of` gives; `cache_dtype`: the engine option kv_cache_dtype;
    `max_model_len`: tokens, which matter to states without prefix caching only. Without prefix caching a
    request keeps one state, with it one state at the end of every block. `drafted`: tokens that a draft
    proposes, each with a block for the state after it. Raises ValueError if the topology is
    impossible, or if a state does not fit into a block.
    """
    _check(geometry, tp)
    specs: dict[str, Any] = {}
    for word, kind in geometry.kinds.items():
        if isinstance(kind, State):
            page = block_size * _bytes_per_token(_main_attention(geometry), geometry, tp, cache_dtype)
            size = block_size if prefix_caching else max_model_len
            specs[word] = _state_spec(geometry, kind, tp, size, page, prefix_caching, drafted)
        else:
            specs[word] = _attention_spec(kind, geometry, tp, block_size, cache_dtype, kernel_block)
    return {layer.name: specs[layer.word] for layer in expand_layers(geometry)}


def specs_of_config(config: Any) -> dict[str, Any]:
    """Layer name -> KVCacheSpec, as vLLM's workers make it of the layers of a VllmConfig and their backends
    (v1/worker/gpu/attn_utils.py: get_kv_cache_spec). `worker.with_config` is around the call.
    """
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    return get_kv_cache_spec(config)


def backend_of(kind: Kind, config: Any) -> Any:
    """The class of the backend that vLLM chooses for a kind of layers (v1/attention/selector.py).

    `worker.with_config` is around the call. States have one and the same: the suite computes none.
    """
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.attention.selector import get_attn_backend, get_mamba_attn_backend

    if isinstance(kind, State):
        return get_mamba_attn_backend(MambaAttentionBackendEnum.GDN_ATTN)
    return get_attn_backend(
        head_size=kind.head_size,
        dtype=config.model_config.dtype,
        kv_cache_dtype=config.cache_config.cache_dtype,
        use_mla=isinstance(kind, Mla),
    )


def conv_state_layout() -> str:
    """The order of the axes of convolution states in this process, "DS" or "SD": see `state_segments`.

    Source: model_executor/layers/mamba/mamba_utils.py: get_conv_state_layout.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return str(get_conv_state_layout())


def zeroed_layers(config: Any) -> frozenset[str]:
    """Layers of which vLLM zeroes new blocks, unless the connector names their group as loaded.

    As in SingleTypeKVCacheManager.__init__ (v1/core/single_type_kv_cache_manager.py).
    """
    from vllm.v1 import kv_cache_interface as interface

    if not getattr(config, "needs_kv_cache_zeroing", False):
        return frozenset()
    never = getattr(interface, "CircularBufferSpec", ())
    return frozenset(
        name
        for group in config.kv_cache_groups
        for name in group.layer_names
        if isinstance(group.kv_cache_spec, interface.AttentionSpec)
        and not isinstance(group.kv_cache_spec, never)
    )


def _check(geometry: Geometry, tp: int) -> None:
    if reason := possible(geometry, tp):
        raise ValueError(reason)


def _size(dtype: str) -> int:
    return {"bfloat16": 2, "float16": 2, "float32": 4}[dtype]


def _main_attention(geometry: Geometry) -> Attention:
    """The kind of the model's own first attention layer: vLLM derives the pages of states from it."""
    kinds: list[Kind] = [layer.kind for layer in expand_layers(geometry) if not layer.draft]
    return next(kind for kind in kinds if not isinstance(kind, State))


def _bytes_per_token(kind: Attention, geometry: Geometry, tp: int, cache_dtype: str) -> int:
    """Bytes of one token in one layer on one rank. Cases are planned with it where vLLM is not imported."""
    size = (
        1
        if cache_dtype.startswith("fp8")
        else _size(geometry.dtype if cache_dtype == "auto" else cache_dtype)
    )
    return kv_heads(kind, tp, rank=0)[1] * kind.head_size * (1 if isinstance(kind, Mla) else 2) * size


def window_of(spec: Any) -> int:
    """Tokens for which layers of a KV cache group have blocks: their sliding window, or 0 for all tokens.

    `spec`: the group's KVCacheSpec. Without the hybrid memory allocator layers with a window are part of a
    group of full attention, whose spec knows the window, too. vLLM's own function is
    v1/kv_cache_interface.py: get_kv_cache_spec_sliding_window.
    """
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    if inner := getattr(spec, "kv_cache_specs", None):  # UniformTypeKVCacheSpecs
        found = {window_of(one) for one in inner.values()}
        return found.pop() if len(found) == 1 else 0
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0


def _attention_spec(
    kind: Attention, geometry: Geometry, tp: int, block_size: int, cache_dtype: str, kernel_block: int
) -> Any:
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        get_kv_quant_mode,
    )

    common: dict[str, Any] = {
        "num_kv_heads": kv_heads(kind, tp, rank=0)[1],
        "head_size": kind.head_size,
        "dtype": STR_DTYPE_TO_TORCH_DTYPE[geometry.dtype if cache_dtype == "auto" else cache_dtype],
        "kv_quant_mode": get_kv_quant_mode(cache_dtype),
    }
    if isinstance(kind, Mla):
        shards = latent_shards(geometry.family)
        return MLAAttentionSpec(
            block_size=block_size, max_tp_shards=shards, cache_dtype_str=cache_dtype, **common
        )
    if isinstance(kind, SlidingWindow):
        # A window layer takes the largest block its kernel can run within the page of the others.
        whole = max(kernel_block, block_size // kernel_block * kernel_block)
        return SlidingWindowSpec(block_size=whole, sliding_window=kind.window, **common)
    return FullAttentionSpec(block_size=block_size, **common)


def _state_spec(
    geometry: Geometry,
    kind: State,
    tp: int,
    block_size: int,
    page: int,
    prefix_caching: bool,
    drafted: int,
) -> Any:
    """`page`: bytes of a block of attention, up to which the state is padded."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    needed = _state_bytes(geometry, kind, tp)
    if needed > page:
        raise ValueError(
            f"A state of {geometry.id} has {needed} bytes at tensor parallel size {tp}, "
            f"a block of attention {page}."
        )
    if kind.mechanism == "kda":
        shapes = MambaStateShapeCalculator.kda_state_shape(
            tp, kind.value_heads, kind.head_v, conv_kernel_size=kind.kernel
        )
    else:
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
            tp, kind.key_heads, kind.value_heads, kind.head_k, kind.head_v, kind.kernel
        )
    return MambaSpec(
        block_size=block_size,
        shapes=shapes,
        dtypes=(STR_DTYPE_TO_TORCH_DTYPE[kind.conv_dtype], STR_DTYPE_TO_TORCH_DTYPE[kind.ssm_dtype]),
        page_size_padded=page if page > needed else None,
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,  # KDA uses it too
        mamba_cache_mode="align" if prefix_caching else "none",
        num_speculative_blocks=drafted,
    )


def _state_bytes(geometry: Geometry, kind: State, tp: int) -> int:
    return sum(
        segment.rows * segment.elements * segment.element_size
        for segment in state_segments(geometry, kind, tp)
    )
