"""Gaps in a sliding window: tokens that the next forward reads and that lie on the null block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pytest_kvconform.kvspace.rows.compare import MISSING, Comparison
from pytest_kvconform.kvspace.rows.explain import intervals


@dataclass(frozen=True)
class Gap:
    """What is missing, and why it is likely so; one sentence each."""

    sentence: str
    cause: str


def missing_window(comparison: Comparison) -> Gap | None:
    """The gap in the windows of a request, or None.

    Token t of a layer with window W reads tokens t - W + 1 to t. vLLM lays the block table out for the token after the ones that are
    loaded (v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens). If D loads N tokens and then computes token N - 1 again, it
    reads one token further back than the table goes; that token is gone when it is the last one of its block.
    """
    layers, missing, block_size, window, position = [], set(), 0, 0, 0
    for due in comparison.due:
        gone = np.flatnonzero((comparison.kinds[due.layer] == MISSING).any(axis=(1, 2)))
        if due.window and len(gone):
            layers.append(due.layer)
            missing |= set(gone.tolist())
            block_size, window, position = due.block_size, due.window, due.end
    if not missing:
        return None
    first = position - window + 1
    what = f"token{'s' if len(missing) > 1 else ''} {intervals(missing)}"
    sentence = (
        f"{what} of {_names(layers)} (window {window}) {'are' if len(missing) > 1 else 'is'} not in D's cache "
        f"when D computes token {position}, which reads tokens {max(first, 0)} to {position}"
    )
    if missing == {first} and (first + 1) % block_size == 0:
        return Gap(
            sentence,
            "the block table is laid out for the token after the last one, and D computes the last prompt token again: its window "
            "begins one token earlier, with the last token of a block that was already given up",
        )
    return Gap(
        sentence,
        "the block table of a sliding window group does not reach back to the beginning of the window",
    )


def _names(layers: list[str]) -> str:
    return f"{layers[0]} and {len(layers) - 1} more layers" if len(layers) > 1 else layers[0]
