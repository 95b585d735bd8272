"""`PlainDeltaAttention._forward` against a naive layer: one request, one token, one head at a time.

The order of Q, K and V behind the fused convolution, the sigmoid of beta, the gate and the norm come from
Kimi's own code of the model (moonshotai/Kimi-Linear-48B-A3B-Instruct, modeling_kimi.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports
from tests.helpers.fixtures import must_be_installed

HEADS, WIDTH, TAPS, SLOTS = 2, 16, 4, 6
CHANNELS = HEADS * WIDTH
# two prompts, of which one continues, and a request that decodes: tokens, slot, whether it has a state
REQUESTS = [(5, 3, False), (9, 1, True), (1, 4, True)]
TOKENS = sum(tokens for tokens, _, _ in REQUESTS)
LIMIT = 1e-5  # measured: 5e-7; with one mistake in the layer 1.5 and more


@pytest.fixture(scope="module")
def kind() -> type[Any]:
    """The class of the layer."""
    must_be_installed()
    mend_imports()
    from pytest_kvconform.rigs.vllm_setup.cpu_layers.delta_attention import PlainDeltaAttention

    return PlainDeltaAttention


@pytest.fixture
def layer(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A layer with random weights and states, without the engine around it."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.third_party.flash_linear_attention.ops.kda import FusedRMSNormGated

    from pytest_kvconform.rigs.vllm_setup.cpu_layers import delta_attention

    draw = torch.Generator().manual_seed(17)
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    made.prefix, made.local_num_heads, made.head_dim, made.gate_lower_bound = "layer", HEADS, WIDTH, None
    made.conv1d = torch.nn.Module()
    made.conv1d.weight = torch.randn(3 * CHANNELS, 1, TAPS, generator=draw)
    made.A_log, made.dt_bias = torch.randn(HEADS, generator=draw) - 2, torch.randn(CHANNELS, generator=draw)
    with set_current_vllm_config(VllmConfig()):
        made.o_norm = FusedRMSNormGated(WIDTH, activation="sigmoid")
    made.o_norm.weight.data = torch.rand(WIDTH, generator=draw) + 0.5
    made.kv_cache = (
        torch.randn(SLOTS, TAPS - 1, 3 * CHANNELS, generator=draw),
        torch.randn(SLOTS, HEADS, WIDTH, WIDTH, generator=draw),
    )
    lengths, slots, continued = zip(*REQUESTS, strict=True)
    step = SimpleNamespace(
        spec_sequence_masks=None,
        num_actual_tokens=TOKENS,
        num_prefills=2,
        non_spec_query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
        non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32),
        has_initial_state=torch.tensor(continued),
    )
    context = SimpleNamespace(attn_metadata={"layer": step})
    monkeypatch.setattr(delta_attention, "get_forward_context", lambda: context)
    monkeypatch.setattr(delta_attention, "is_conv_state_dim_first", lambda: False)
    return made


def naive(
    layer: Any,
    x: torch.Tensor,
    g1: torch.Tensor,
    g2: torch.Tensor,
    beta: torch.Tensor,
    slot: int,
    fresh: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One request in float64. Returns the outputs [token, head, channel], and the two states it leaves."""
    before, state = (torch.zeros_like(part[slot]) if fresh else part[slot].clone() for part in layer.kv_cache)
    history, state = torch.cat([before, x]).double(), state.double().transpose(1, 2)  # [head, key, value]
    out = torch.empty(len(x), HEADS, WIDTH, dtype=torch.float64)
    for t in range(len(x)):
        mixed = (history[t : t + TAPS] * layer.conv1d.weight[:, 0].T.double()).sum(0)
        q, k, v = (mixed * mixed.sigmoid()).view(3, HEADS, WIDTH)
        for h in range(HEADS):
            query, key = (one[h] / (one[h].square().sum() + 1e-6).sqrt() for one in (q, k))
            raw = g1[t, h].double() + layer.dt_bias.view(HEADS, WIDTH)[h]
            forget = torch.exp(-layer.A_log[h].double().exp() * torch.log1p(raw.exp()))
            kept = forget[:, None] * state[h]
            state[h] = kept + beta[t, h].double().sigmoid() * torch.outer(key, v[h] - kept.T @ key)
            read = state[h].T @ query / WIDTH**0.5
            normed = read / (read.square().mean() + layer.o_norm.eps).sqrt() * layer.o_norm.weight
            out[t, h] = normed * g2[t, h].double().sigmoid()
    return out, history[-TAPS + 1 :], state.transpose(1, 2)


def test_it_computes_what_the_naive_layer_does(layer: Any) -> None:
    draw = torch.Generator().manual_seed(23)
    mixed = torch.randn(TOKENS, 3 * CHANNELS, generator=draw)
    g1, g2 = (torch.randn(TOKENS, HEADS, WIDTH, generator=draw) for _ in range(2))
    beta = torch.randn(TOKENS, HEADS, generator=draw)
    wanted, first = [], 0
    for tokens, slot, continued in REQUESTS:
        span = slice(first, first := first + tokens)
        parts = (part[span] for part in (mixed, g1, g2, beta))
        wanted.append(naive(layer, *parts, slot, not continued))
    others = [part[[0, 2, 5]].clone() for part in layer.kv_cache]
    out = torch.full((1, TOKENS, HEADS, WIDTH), torch.nan)
    with torch.no_grad():
        layer._forward(mixed, g1[None], g2, beta[None], out)
    found = [(out[0] - torch.cat([want[0] for want in wanted])).abs().max()]
    for (_, slot, _), (_, *states) in zip(REQUESTS, wanted, strict=True):
        found += [(got[slot] - want).abs().max() for got, want in zip(layer.kv_cache, states, strict=True)]
    assert max(found) < LIMIT
    for before, part in zip(others, layer.kv_cache, strict=True):  # slots of nobody
        assert torch.equal(before, part[[0, 2, 5]])


def test_weights_in_float32_stay_as_they_are(kind, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops

    from pytest_kvconform.rigs.vllm_setup import overrides

    def pack(weight: torch.Tensor) -> str:  # as vLLM's does, which needs AVX512-BF16
        assert weight.dtype == torch.bfloat16, "\"causal_conv1d_fwd_kernel_impl\" not implemented for 'Float'"
        return "packed"

    monkeypatch.setattr(_custom_ops, "causal_conv1d_weight_pack", pack)
    overrides.leave_float32_convolutions_unpacked()
    weight = torch.randn(CHANNELS, TAPS)
    assert torch.equal(_custom_ops.causal_conv1d_weight_pack(weight), weight.view(CHANNELS, 1, TAPS))
    assert _custom_ops.causal_conv1d_weight_pack(weight.bfloat16()) == "packed"
