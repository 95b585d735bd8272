"""Layers in plain torch for engines on a CPU, where vLLM has kernels for GPUs alone.

| module | what is in it |
|---|---|
| `delta_rule` | the recurrence of Kimi Delta Attention, on tensors |
| `delta_attention` | vLLM's layer of Kimi Delta Attention, with that recurrence in place of its kernels |
| `latent_attention` | what vLLM's latent attention of KimiLinear does in fused kernels |
| `latent_prefixes` | that attention behind tokens that are in the cache |

`preload.py` calls `use` on a CPU, so nothing of it is in a vLLM that this suite did not start. All weights,
projections, shapes and types of states, and the places in the pool are vLLM's own.
"""

from __future__ import annotations

import os
from collections.abc import Collection

KIMI = "KimiLinearForCausalLM"


def use(architectures: Collection[str]) -> None:
    """Prepare this process and its forks for engines with models of these architectures."""
    if KIMI in architectures:
        os.environ["VLLM_KIMI_K3_GEMM_AR"] = "0"  # a kernel for GPUs that is on by default
        from pytest_kvconform.rigs.vllm_setup.cpu_layers import (
            delta_attention,
            latent_attention,
            latent_prefixes,
        )

        delta_attention.register()
        latent_attention.register()
        latent_prefixes.allow_prefixes()
