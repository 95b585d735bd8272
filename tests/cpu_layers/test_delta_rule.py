"""The recurrence of Kimi Delta Attention against its published form and against vLLM's kernels."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pytest_kvconform.rigs.vllm_setup.cpu_layers.delta_rule import delta_rule, log_decay

HEADS, KEY, VALUE, TOKENS = 3, 16, 8, 37
HERE = Path(__file__).parent
WITH_TRITON = (sys.platform, platform.machine()) == ("linux", "x86_64")  # as in pyproject.toml
# Limits of differences, with what was measured
OF_PAPER = 2e-6  # 3e-7: float32 against float64
OF_HEADS = 1e-6  # 0: another number of heads could have another order of sums
OF_BFLOAT16 = 0.02  # 0.004 of the standard deviation
OF_KERNEL = 1e-5  # 7e-7: another order of sums


class Draw:
    """Random inputs of the recurrence, of one seed."""

    def __init__(self, tokens: int = TOKENS, heads: int = HEADS, key: int = KEY, value: int = VALUE):
        draw = torch.Generator().manual_seed(11)
        self.q, self.k, self.raw = (torch.randn(tokens, heads, key, generator=draw) for _ in range(3))
        self.v = torch.randn(tokens, heads, value, generator=draw)
        self.beta = torch.rand(tokens, heads, generator=draw)
        self.a_log, self.bias = (
            torch.randn(heads, generator=draw) - 2,
            torch.randn(heads * key, generator=draw),
        )
        self.state = torch.randn(heads, value, key, generator=draw)

    def decay(self, lower_bound: float | None = None) -> torch.Tensor:
        return log_decay(self.raw, self.a_log, self.bias, lower_bound)

    def run(self, state: torch.Tensor, first: int = 0, end: int | None = None) -> torch.Tensor:
        span = slice(first, end)
        arguments = (x[span] for x in (self.q, self.k, self.v, self.decay(), self.beta))
        return delta_rule(*arguments, state)


def published(draw: Draw, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """S = (I - beta k k^T) Diag(alpha) S + beta k v^T and o = S^T q, with matrices, in float64.

    Kimi Linear, equation 1. `state`: [head, key, value], as in the paper.
    """
    out = torch.empty(TOKENS, HEADS, VALUE, dtype=torch.float64)
    s = state.double().clone()
    for t in range(TOKENS):
        for h in range(HEADS):
            q, k = (x / (x.dot(x) + 1e-6).sqrt() for x in (draw.q[t, h].double(), draw.k[t, h].double()))
            shifted = draw.raw[t, h].double() + draw.bias.view(HEADS, KEY)[h].double()
            alpha = torch.exp(-draw.a_log[h].double().exp() * torch.log1p(shifted.exp()))
            beta = draw.beta[t, h].double()
            erase = torch.eye(KEY, dtype=torch.float64) - beta * torch.outer(k, k)
            s[h] = erase @ (torch.diag(alpha) @ s[h]) + beta * torch.outer(k, draw.v[t, h].double())
            out[t, h] = s[h].T @ q / KEY**0.5
    return out, s


def test_it_is_the_published_recurrence() -> None:
    draw, state = Draw(), Draw().state
    want, last = published(draw, state.transpose(1, 2))
    torch.testing.assert_close(draw.run(state).double(), want, rtol=0, atol=OF_PAPER)
    torch.testing.assert_close(state.transpose(1, 2).double(), last, rtol=0, atol=OF_PAPER)


@pytest.mark.parametrize("cuts", [(0, 1), (0, 16), (0, 7, 8, 30), tuple(range(TOKENS))])
def test_pieces_give_the_same_bits_as_the_whole(cuts: tuple[int, ...]) -> None:
    draw, whole, pieces = Draw(), Draw().state, Draw().state
    want = draw.run(whole)
    ends = (*cuts[1:], TOKENS)
    got = torch.cat([draw.run(pieces, first, end) for first, end in zip(cuts, ends, strict=True)])
    assert torch.equal(got, want)
    assert torch.equal(pieces, whole)


def test_heads_do_not_depend_on_each_other() -> None:
    """A rank computes its own heads, so all ranks together compute what one would."""
    draw, whole, one = Draw(), Draw().state, Draw().state[1:2]
    want = draw.run(whole)
    mine = (x[:, 1:2] for x in (draw.q, draw.k, draw.v, draw.decay(), draw.beta))
    torch.testing.assert_close(delta_rule(*mine, one), want[:, 1:2], rtol=0, atol=OF_HEADS)
    torch.testing.assert_close(one, whole[1:2], rtol=0, atol=OF_HEADS)


def test_a_bounded_decay_keeps_its_bound() -> None:
    decay = Draw().decay(lower_bound=-0.5)
    assert decay.min() > -0.5
    assert decay.max() < 0


def test_one_decay_for_all_channels_is_gated_deltanet() -> None:
    """vLLM's kernel of Gated DeltaNet for CPUs, in bfloat16. Its state is [head, key, value]."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    draw = Draw(tokens=150, heads=2, key=64, value=64)
    q, k, v = (x.bfloat16() for x in (draw.q, draw.k, draw.v))
    decay = draw.decay()[..., :1].contiguous()
    states = torch.zeros(3, 2, 64, 64)
    states[1] = draw.state.transpose(1, 2)
    want, _ = _custom_ops.chunk_gated_delta_rule_cpu(
        query=q[None],
        key=k[None],
        value=v[None],
        g=decay[None, ..., 0],
        beta=draw.beta[None].bfloat16(),
        initial_state=states,
        output_final_state=True,
        cu_seqlens=torch.tensor([0, 150], dtype=torch.int32),
        head_first=False,
        use_qk_l2norm_in_kernel=True,
        initial_state_indices=torch.tensor([1], dtype=torch.int32),
    )
    got = delta_rule(q, k, v, decay.expand(-1, -1, 64), draw.beta.bfloat16(), draw.state)
    spread = want.float().std()
    assert (got - want[0].float()).std() < OF_BFLOAT16 * spread
    assert (draw.state.transpose(1, 2) - states[1]).std() < OF_BFLOAT16 * states[1].std()


@pytest.mark.skipif(not WITH_TRITON, reason="the extra `test` has Triton for Linux on x86_64 alone")
def test_it_is_the_kernel_that_vllm_has_for_gpus() -> None:
    """Outputs, state and the order of its axes, of vLLM's Triton kernel in Triton's interpreter.

    Without and with a bound of the decay.
    """
    done = subprocess.run(
        [sys.executable, HERE / "interpreted_kernel.py"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [float(word) for line in done.stdout.splitlines()[-2:] for word in line.split()]
    assert len(found) == 4
    assert max(found) < OF_KERNEL
