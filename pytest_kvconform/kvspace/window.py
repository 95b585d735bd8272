"""Sentences on a gap in a sliding window: tokens that D's next forward reads and for which D has no block.

Token t of a layer with window W reads tokens t - W + 1 to t. vLLM lays the block table out for the token
after the loaded ones (v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens). If D loads N tokens
and then computes token N - 1 again, D reads one token before the first one of the table. That token is lost
if it is the last one of its block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pytest_kvconform.kvspace.kinds import intervals


@dataclass(frozen=True)
class Gap:
    """What is missing, and why it is likely so; one sentence each."""

    sentence: str
    cause: str


def describe_gap(
    layers: Sequence[str], missing: Collection[int], window: int, position: int, block_size: int
) -> Gap:
    """The gap in the windows of `layers` if D computes token `position` and has no block for `missing`."""
    first, several = position - window + 1, len(missing) > 1
    names = f"{layers[0]} and {len(layers) - 1} more layers" if len(layers) > 1 else layers[0]
    sentence = (
        f"token{'s' if several else ''} {intervals(missing)} of {names} (window {window}) "
        f"{'are' if several else 'is'} not in D's cache when D computes token {position}, "
        f"which reads tokens {max(first, 0)} to {position}"
    )
    if set(missing) == {first} and (first + 1) % block_size == 0:
        cause = (
            "the block table is laid out for the token after the last one, and D computes the last prompt "
            "token again: its window begins one token earlier, with the last token of a block that was "
            "already freed"
        )
    else:
        cause = "the block table of a sliding window group does not reach back to the beginning of the window"
    return Gap(sentence, cause)
