"""Run vLLM's Triton kernel of Kimi Delta Attention in Triton's interpreter, and `delta_rule` beside it.

Prints a line for a decay without a bound, and one for a bounded decay: the largest difference of the outputs
and that of the states. vLLM takes Triton for missing on a CPU. So this process gives it Triton first, and
loads the kernel's file alone.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import triton
import triton.language as tl
import vllm
from triton.language.extra import libdevice
from vllm import triton_utils

from pytest_kvconform.rigs.vllm_setup.cpu_layers.delta_rule import delta_rule, log_decay

ROOT = Path(vllm.__file__).parent
OPS = "vllm.third_party.flash_linear_attention.ops"
KERNEL = "models/kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py"
HEADS, WIDTH, TOKENS, SLOT = 2, 16, 7, 2


def load(name: str, path: str) -> ModuleType:
    """Load a file of vLLM without the package that it is in."""
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def empty(name: str, **names: object) -> None:
    """Let a module of vLLM count as imported, with these names in it."""
    sys.modules[name] = module = ModuleType(name)
    module.__dict__.update(names, __path__=[])


def main() -> None:
    """See the docstring of this file."""
    triton_utils.triton, triton_utils.tl, triton_utils.tldevice = triton, tl, libdevice
    empty(OPS.rpartition(".")[0])
    empty(OPS)
    empty(f"{OPS}.utils", is_gather_supported=False)
    load(f"{OPS}.op", "third_party/flash_linear_attention/ops/op.py")
    kernel = load("kernel", KERNEL)
    # the interpreter replaces functions of `tl`, which the kernel has under names of its own
    kernel.exp, kernel.log = lambda x: tl.exp(x), lambda x: tl.log(x)
    for lower_bound in (None, -5.0):
        print(*differences(kernel, lower_bound))


def differences(kernel: ModuleType, lower_bound: float | None) -> tuple[float, float]:
    """Of the outputs and of the states."""
    draw = torch.Generator().manual_seed(3)
    q, k, v, raw = (torch.randn(1, TOKENS, HEADS, WIDTH, generator=draw) for _ in range(4))
    beta = torch.randn(1, TOKENS, HEADS, generator=draw)
    a_log, bias = torch.randn(HEADS, generator=draw) - 2, torch.randn(HEADS * WIDTH, generator=draw)
    states = torch.randn(3, HEADS, WIDTH, WIDTH, generator=draw)
    mine = states[SLOT].clone()
    out, _ = kernel.fused_recurrent_kda_fwd(
        q=q,
        k=k,
        v=v,
        g=raw,
        beta=beta,
        initial_state=states,
        cu_seqlens=torch.tensor([0, TOKENS], dtype=torch.int32),
        ssm_state_indices=torch.full((1, TOKENS), SLOT, dtype=torch.int32),
        A_log=a_log,
        dt_bias=bias,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=lower_bound,
    )
    decay = log_decay(raw[0], a_log, bias, lower_bound)
    got = delta_rule(q[0], k[0], v[0], decay, beta[0].sigmoid(), mine)
    return (got - out[0]).abs().max().item(), (mine - states[SLOT]).abs().max().item()


if __name__ == "__main__":
    main()
