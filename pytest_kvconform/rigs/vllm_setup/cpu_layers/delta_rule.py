"""The recurrence of Kimi Delta Attention (Kimi Linear, arXiv 2510.26692, equation 1), token by token.

With one decay for all channels of a head it is the recurrence of Gated DeltaNet (arXiv 2412.06464).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

EPSILON = 1e-6  # of the norm of queries and keys, as in vLLM's kernels
LINEAR_ABOVE = 20.0  # from here on vLLM's kernels take softplus(x) for x


def log_decay(
    raw: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """The logarithm of each channel's decay: float32 [token, head, channel], not above 0.

    `raw`: [token, head, channel]; `a_log`: [head]; `bias`: [head * channel]; `lower_bound`: of models whose
    decay is bounded, else None.
    """
    rate, shifted = a_log.float().exp()[:, None], raw.float() + bias.float().view(raw.shape[1:])
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * shifted)
    return -rate * F.softplus(shifted, threshold=LINEAR_ABOVE)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Run one request's tokens through `state`, in place. Returns the outputs: float32 [token, head, value].

    `q`, `k`: [token, head, key], normed here; `v`: [token, head, value]; `decay`: of `log_decay`; `beta`:
    [token, head], from 0 to 1; `state`: float32 [head, value, key]. Each token does the same arithmetic,
    whatever tokens come with it, so a prompt in pieces gives the same bits as a prompt at once.
    """
    q, k = (x.float() / (x.float().square().sum(-1, keepdim=True) + EPSILON).sqrt() for x in (q, k))
    # one layout for each token's factors: [token, head, 1, key] rows and [token, head, value, 1] columns
    rows, queries, keep = k[:, :, None], (q * q.shape[-1] ** -0.5)[..., None], decay.exp()[:, :, None]
    columns, values, rates = k[..., None], v.float()[..., None], beta.float()[..., None, None]
    out = torch.empty(values.shape, dtype=torch.float32, device=v.device)
    for t in range(len(q)):
        state *= keep[t]
        change = torch.sub(values[t], state @ columns[t]).mul_(rates[t])
        state.baddbmm_(change, rows[t])
        torch.bmm(state, queries[t], out=out[t])
    return out.squeeze(-1)
