"""Stand-ins for a model's layers. They have no weights, and describe the KV cache as real layers do.

vLLM keeps its layers in `compilation_config.static_forward_context`. Connectors read backends, specs and
cache tensors from there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from model_matrix.geometries import Geometry, Mla, State, expand_layers
from pytest_kvconform.rigs.bytes.messages import PACKED, ByteEngineSpec
from pytest_kvconform.rigs.vllm_setup.engine_config import choose_block_size
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import backend_of, layer_specs, specs_of_config
from pytest_kvconform.rigs.vllm_setup.worker import with_config


class PackedBackend(AttentionBackend):
    """A backend as on GPUs: [K | V] per token, any layout, small kernel blocks."""

    kernel_blocks: tuple[Any, ...] = (MultipleOf(16),)

    @staticmethod
    def get_name() -> str:
        return "KVCONFORM_PACKED"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("there is no model")

    @staticmethod
    def get_builder_cls() -> Any:
        raise NotImplementedError("there is no model")

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        return list(cls.kernel_blocks)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return tuple(KVCacheLayout)


class PackedMlaBackend(PackedBackend):
    """The same for latent attention: one row a token."""

    @staticmethod
    def get_name() -> str:
        return "KVCONFORM_PACKED_MLA"


class Layer(AttentionLayerBase):
    """A layer without weights."""

    def __init__(self, backend: type[AttentionBackend], draft: bool):
        self.backend, self.is_draft_layer = backend, draft
        self.spec: Any = None
        self.impl = SimpleNamespace()

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self.spec

    def get_state_shape(self) -> Any:
        return self.spec.shapes

    def get_state_dtype(self) -> Any:
        return self.spec.dtypes

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        (MambaBase if isinstance(self.spec, MambaSpec) else AttentionLayerBase).bind_kv_cache(self, kv_cache)


def make_layers(geometry: Geometry, spec: ByteEngineSpec, config: Any) -> dict[str, Layer]:
    """Layer name -> stand-in, in the order of the model. They are put into the VllmConfig `config`, where
    vLLM keeps its layers.
    """
    if spec.kernel_block:
        PackedBackend.kernel_blocks = (spec.kernel_block,)
    with with_config(config):  # vLLM chooses backends by it
        backends = {word: _backend(kind, spec, config) for word, kind in geometry.kinds.items()}
    layers = {layer.name: Layer(backends[layer.word], layer.draft) for layer in expand_layers(geometry)}
    config.compilation_config.static_forward_context.update(layers)
    return layers


def specs_of_layers(
    layers: dict[str, Layer], geometry: Geometry, spec: ByteEngineSpec, config: Any
) -> dict[str, Any]:
    """Layer name -> KVCacheSpec of one rank, as vLLM's workers make it of what a layer and its backend say.
    Each layer gets its own.

    `config`: the VllmConfig of the rank, after vLLM has chosen the size of blocks.
    """
    with with_config(config):
        specs = layer_specs(
            geometry,
            spec.tensor_parallel,
            config.cache_config.block_size,
            spec.cache_dtype,
            prefix_caching=spec.prefix_caching,
            max_model_len=spec.max_model_len,
            kernel_block=smallest_kernel_block({layer.backend for layer in layers.values()}),
            drafted=config.num_speculative_tokens,
        )
        for name, layer in layers.items():
            layer.spec = specs[name]
        specs = specs_of_config(config)
    for name, layer in layers.items():
        layer.spec = specs[name]
    return specs


def specs_of_rank(config: Any, geometry: Geometry, spec: ByteEngineSpec) -> dict[str, Any]:
    """Layer name -> KVCacheSpec of one rank, in the order of vLLM's executors: the layers, then the size of
    blocks, then the specs. `config`: the VllmConfig of the rank, which gets the layers and the size.
    """
    layers = make_layers(geometry, spec, config)
    choose_block_size(config)
    return specs_of_layers(layers, geometry, spec, config)


def _backend(kind: Any, spec: ByteEngineSpec, config: Any) -> type[AttentionBackend]:
    if spec.content == PACKED and not isinstance(kind, State):
        return PackedMlaBackend if isinstance(kind, Mla) else PackedBackend
    return backend_of(kind, config)


def smallest_kernel_block(backends: Any) -> int:
    """Tokens of the smallest block that the kernels of every one of these backends can run."""
    sizes = [
        min(s.base if isinstance(s, MultipleOf) else s for s in b.get_supported_kernel_block_sizes())
        for b in backends
    ]
    return max(sizes)


def metadata(spec: Any, slots: np.ndarray) -> Any:
    """Attention metadata of a layer, as far as a connector may look at it.

    `slot_mapping` has one slot per scheduled token.
    """
    made = object.__new__(MLACommonMetadata) if isinstance(spec, MLAAttentionSpec) else SimpleNamespace()
    made.slot_mapping, made.num_actual_tokens = torch.from_numpy(slots), len(slots)
    return made
