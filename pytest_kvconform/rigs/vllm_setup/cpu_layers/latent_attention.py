"""What vLLM's latent attention of KimiLinear (vllm/models/kimi_k3/nvidia/mla.py) does in fused kernels.

The attention itself is vLLM's own for CPUs: cpu_mla.py and prefill/cpu_sdpa.py in v1/attention/backends/mla.
Each function has the parameters of the function of vLLM that it stands for; `positions` and `cos_sin_cache`
are of models with rotary embeddings, which KimiLinear is not.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.models.kimi_k3.nvidia import mla, model
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend


def write_latent(cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
    """Write a row [latent | rope] for each token.

    `cache`: [block, token, word]; `slots`: [token], -1: none.
    """
    rows, kept = torch.cat([latent, rope.reshape(len(latent), -1)], dim=-1), slots >= 0
    cache.view(-1, cache.shape[-1])[slots[kept]] = rows[kept].to(cache.dtype)


def concat_key(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """Keys [token, head, nope + rope]: all heads share `k_pe`."""
    shared = k_pe.reshape(len(k_nope), 1, -1).expand(-1, k_nope.shape[1], -1)
    return torch.cat([k_nope, shared.to(k_nope.dtype)], dim=-1)


def concat_key_and_insert(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c_normed: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
) -> torch.Tensor:
    """The keys of a prefill, whose latent rows are written to the cache."""
    assert positions is None, "no rotary embedding here"
    write_latent(kv_cache, slot_mapping, kv_c_normed, k_pe)
    return concat_key(k_nope, k_pe)


def concat_query_and_insert(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None = None,
    **more: Any,
) -> torch.Tensor:
    """The queries [token, head, latent + rope] of a decode, whose latent rows are written to the cache."""
    assert positions is None, "no rotary embedding here"
    write_latent(kv_cache, slot_mapping, kv_c_normed, k_pe)
    return torch.cat([ql_nope, q_pe], dim=-1)


class LatentAttention(mla.MultiHeadLatentAttention):
    """vLLM's layer, whose projection to keys and values keeps its weight as it is in the checkpoint.

    vLLM's latent attention of other models asks for that, too (model_executor/layers/attention/
    mla_attention.py). Otherwise the linear layers for CPUs repack the weight, and the layer finds none.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.kv_b_proj._cpu_skip_gemm_dispatch = True


def register() -> None:
    """Let engines of this process and its forks use the layer and the functions of this module.

    They use one backend on every CPU: that for CPUs with AMX computes prefills in a way of its own.
    """
    model.MultiHeadLatentAttention = LatentAttention
    mla.get_attn_backend = lambda *args, **kwargs: CPUMLABackend
    mla.fused_mla_key_concat_kv_cache_insert = concat_key_and_insert
    mla.fused_mla_decode_q_concat_kv_cache_insert = concat_query_and_insert
    mla.fused_mla_kv_concat = concat_key
