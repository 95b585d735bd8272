"""Prompt lengths at which an index can be off by one, computed from the block size and the window."""

from __future__ import annotations

from model_matrix.families import Family

# How many block boundaries are tested from both sides, and how many windows that begin exactly at a block.
BLOCKS = {"quick": 2, "full": 6}
LAYOUTS = {"quick": 2, "full": 4}


def prompt_lengths(family: Family, block_size: int, matrix: str) -> tuple[int, ...]:
    """Return prompt lengths in tokens, sorted, each once.

    `block_size`: tokens per block in the running engine.

    The longest is below 7 * block_size, or one token longer than the last layout of a window.
    Raises ValueError for a block size below 2, and KeyError for a matrix that is not quick or full.
    """
    if block_size < 2:
        raise ValueError(f"a block of {block_size} tokens has no inside")
    many = 2 if family.has_state else 6
    # nothing to hand over; many blocks, the last one partly filled
    lengths = {1, many * block_size + max(1, block_size // 4)}
    for blocks in range(1, BLOCKS[matrix] + 1):
        lengths |= _around(blocks * block_size)
    if family.sliding_window:
        lengths |= _around(family.sliding_window)
        # D computes the last prompt token, which attends back to token N - W. Here token N - W is the last
        # one of a block that the window of the next token does not touch: (N - W + 1) % block_size == 0.
        # The first such N is W - 1 + block_size.
        for blocks in range(1, LAYOUTS[matrix] + 1):
            lengths |= _around(family.sliding_window - 1 + blocks * block_size)
    if family.convolution:
        # the convolution's state, which holds one token less: nearly empty, and just full
        lengths |= {2, family.convolution}
    return tuple(sorted(length for length in lengths if length > 0))


def _around(length: int) -> set[int]:
    return {length - 1, length, length + 1}
