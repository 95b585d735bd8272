"""Prompt lengths that matter, computed from the block size and the window: the places where an index is off by one."""

from __future__ import annotations

from model_matrix.families import Family

# How many block boundaries are visited from both sides, and how many times a window begins exactly at a block.
BLOCKS = {"quick": 2, "full": 6}
LAYOUTS = {"quick": 2, "full": 4}


def prompt_lengths(family: Family, block_size: int, matrix: str) -> tuple[int, ...]:
    """Prompt lengths in tokens, sorted, each once. `block_size` is the tokens a block really has in the engine.

    The longest is below 7 * block_size, or else one token past the last layout of a window.
    Raises ValueError for a block size below 2, and KeyError for a matrix that is not quick or full.
    """
    if block_size < 2:
        raise ValueError(f"a block of {block_size} tokens has no inside")
    many = 2 if family.has_state else 6
    lengths = {
        1,
        many * block_size + max(1, block_size // 4),
    }  # nothing to hand over; many blocks, the last one partly filled
    for blocks in range(1, BLOCKS[matrix] + 1):
        lengths |= _around(blocks * block_size)
    if family.sliding_window:
        lengths |= _around(family.sliding_window)
        # The last prompt token is computed by D and looks back to token N - W. Here N - W is the last token of a block that the
        # window of the token after it no longer touches: (N - W + 1) % block_size == 0. The first such N is W - 1 + block_size.
        for blocks in range(1, LAYOUTS[matrix] + 1):
            lengths |= _around(family.sliding_window - 1 + blocks * block_size)
    if kernel := family.config.get("linear_conv_kernel_dim", 0):
        lengths |= {
            2,
            kernel,
        }  # the convolution's state, which holds kernel - 1 tokens, is nearly empty; is just full
    return tuple(sorted(length for length in lengths if length > 0))


def _around(length: int) -> set[int]:
    return {length - 1, length, length + 1}
