"""vLLM's layer of Kimi Delta Attention, registered by vLLM's own extension point for layers."""

from __future__ import annotations

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

from pytest_kvconform.rigs.vllm_setup.cpu_layers.delta_rule import delta_rule, log_decay


class PlainDeltaAttention(KimiGatedDeltaNetAttention):
    """The layer with short convolution, gate and recurrence in plain torch."""

    def _forward(
        self,
        mixed_qkv: torch.Tensor,
        g1: torch.Tensor,
        g2: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Fill `core_attn_out` [1, token, head, channel], and leave each request's state in its slot.

        `mixed_qkv`: [token, 3 * head * channel] before the convolution; `g1`: [1, token, head, channel], of
        the decay; `g2`: [token, head, channel], of the output; `beta`: [1, token, head]. A batch of decodes
        is a batch of prompts of one token that all have a state.
        """
        every = get_forward_context().attn_metadata
        step = every.get(self.prefix) if isinstance(every, dict) else None
        if step is None:  # a step that warms up
            core_attn_out.zero_()
            return
        if step.spec_sequence_masks is not None:
            raise NotImplementedError("Kimi Delta Attention on a CPU does not decode speculatively")
        tokens, starts = step.num_actual_tokens, step.non_spec_query_start_loc
        slots = step.non_spec_state_indices_tensor[: len(starts) - 1]
        continued = step.has_initial_state if step.num_prefills else torch.ones(len(slots), dtype=torch.bool)
        conv_state, state = self.kv_cache
        mixed = causal_conv1d_fn_cpu(
            mixed_qkv[:tokens].transpose(0, 1),
            self.conv1d.weight.view(self.conv1d.weight.size(0), -1),
            None,
            conv_state if is_conv_state_dim_first() else conv_state.transpose(-1, -2),
            starts,
            slots,
            continued,
        )
        qkv = mixed.transpose(0, 1).view(tokens, 3, self.local_num_heads, self.head_dim).unbind(1)
        decay = log_decay(g1[0, :tokens], self.A_log, self.dt_bias, self.gate_lower_bound)
        rate = beta[0, :tokens].float().sigmoid()
        spans = starts.tolist()
        for slot, first, end, has_state in zip(
            slots.tolist(), spans[:-1], spans[1:], continued.tolist(), strict=True
        ):
            now = state[slot].float() if has_state else torch.zeros_like(state[slot], dtype=torch.float32)
            q, k, v, keep, write = (x[first:end] for x in (*qkv, decay, rate))
            core_attn_out[0, first:end] = delta_rule(q, k, v, keep, write, now)
            state[slot] = now
        core_attn_out.copy_(self.o_norm.forward_native(core_attn_out, g2))


def register() -> None:
    """Let vLLM build `PlainDeltaAttention` wherever a model asks for its layer."""
    KimiGatedDeltaNetAttention.register_oot(PlainDeltaAttention)
