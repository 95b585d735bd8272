"""The read-out (lm_head) of a canary, in closed form: right answers, and nothing else for any other state.

Rows of `states` are the last hidden states at which a canary must give a certain token. There are fewer of
them than the hidden size, so that a read-out with exactly the wanted logits exists: MARGIN for the wanted
token and 0 for all others. It alone would be too forgiving: a hidden state that is a few percent off has
logits that are a few percent off, and the same greatest one.

The states leave many directions of the hidden space unused. The read-out reads these with large random
weights, `gain` times as large as the hidden state. On the right states this part is 0. A wrong KV cache moves
the hidden state into those directions, too, and then a random token has the greatest logit.

`gain` is as large as the noise of the engine allows, which is measured: the same state, computed by the
kernel for prefills and by the kernel for decoding.
"""

from __future__ import annotations

import numpy as np

READOUT_VERSION = 2  # raise it if the same states give another read-out
MARGIN = 10.0
MOST_GAIN = 300.0  # float32 rounds to 1e-7 of a state, so that logits of right states are off by 0.04
NOISE_SHARE = 0.2  # of the margin that the random part may give to a right state that is off by all noise


def gain_for(noise: float) -> float:
    """Return the largest safe gain. `noise`: greatest distance of two right computations of one state."""
    return min(MOST_GAIN, NOISE_SHARE * MARGIN / noise) if noise > 0 else MOST_GAIN


def solve(
    states: np.ndarray, tokens: np.ndarray, vocabulary: int, used: int, gain: float, seed: int = 0
) -> np.ndarray:
    """Return the read-out: float32 [vocabulary, hidden].

    `states`: [n, hidden]; `tokens`: [n], the wanted token of each state; `used`: tokens that the tokenizer
    has, of `vocabulary`. Raises ValueError if there are not enough directions that the states leave unused.
    """
    count, hidden = states.shape
    if count > 0.9 * hidden:
        raise ValueError(f"{count} states need a hidden size above {int(count / 0.9)}, not {hidden}")
    left, sizes, directions = np.linalg.svd(states.astype(np.float64), full_matrices=False)
    wanted = np.zeros((vocabulary, count))
    wanted[tokens, np.arange(count)] = MARGIN
    exact = (wanted @ left / sizes) @ directions
    random = np.random.default_rng(seed).standard_normal((vocabulary, hidden))
    random[used:] = 0.0
    unused = random - random @ directions.T @ directions
    return (exact + gain * unused).astype(np.float32)
