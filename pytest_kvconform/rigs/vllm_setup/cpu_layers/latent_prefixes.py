"""KimiLinear's latent attention on a CPU behind tokens in the cache: pieces of a prompt, and prefix hits.

KimiLinear has a layer of its own (vllm/models/kimi_k3/nvidia/mla.py), which gathers the rows of these tokens
with a kernel for GPUs. The layer of other models gathers them with a kernel for CPUs
(`gather_mla_context_cache_cpu`), and needs none of this.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

_attend = CPUSDPAMLAPrefillBackend.run_prefill_context_chunk


def gather_rows(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Copy rows that are in the cache already into `dst` [token, word], request after request.

    `src_cache`: [block, token, word]; `block_table`: [request, block]; `cu_seq_lens`: where each request's
    rows begin in `dst`; `token_to_seq`: the request of each row; `seq_starts`: the position of each request's
    first row, None: 0.
    """
    request = token_to_seq[:num_tokens].long()
    position = torch.arange(num_tokens, device=dst.device) - cu_seq_lens[request]
    if seq_starts is not None:
        position = position + seq_starts[request]
    size = src_cache.shape[1]
    blocks = block_table[request, position // size].long()
    dst[:num_tokens] = src_cache[blocks, position % size].to(dst.dtype)


def attend_to_context(
    self: CPUSDPAMLAPrefillBackend,
    chunk: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of a prefill to rows that were in the cache: [token, head, value], [head, token].

    vLLM's function refuses `out`, and KimiLinear's layer gives it one if the backend promises to fill it
    (`supports_out`).
    """
    result, weight = _attend(self, chunk=chunk, q=q, k=k, v=v)
    return (result if out is None else out.copy_(result)), weight


def allow_prefixes() -> None:
    """Let KimiLinear's latent attention in this process and its forks read tokens that are in the cache."""
    _custom_ops.gather_and_maybe_dequant_cache = gather_rows
    CPUSDPAMLAPrefillBackend.run_prefill_context_chunk = attend_to_context
