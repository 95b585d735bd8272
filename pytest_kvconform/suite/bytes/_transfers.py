"""Transfers of the byte rig.

One transfer is one variant of the cases, and its name is the last word of their ids.
"""

from __future__ import annotations

import functools

from model_matrix import load_geometries
from model_matrix.geometries import SlidingWindow, State
from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.bytes.specs import block_size, dropped_tokens, side_of
from pytest_kvconform.rigs.scenario import Prompt, Transfer, tokens

BOUNDARIES = {"quick": 2, "full": 3}  # block boundaries with prompts on both sides
# times that a window begins exactly at a block, with prompts on both sides
LAYOUTS = {
    "quick": 1,
    "full": 2,
}


def lengths(cell: Cell, matrix: str) -> list[Transfer]:
    """One prompt of each length that matters: around block boundaries of P and of D, and around windows."""
    found = {2}
    # states are megabytes a layer: two of twenty cells would take half of the time
    short = has_state(cell) and matrix == "quick"
    for size in _blocks(cell):
        for count in range(1, (1 if has_state(cell) else BOUNDARIES[matrix]) + 1):
            found |= {count * size - 1, count * size, count * size + 1} if not short else {count * size}
        found.add(_long(cell))
        for window in windows(cell):
            found |= {window, window + 1}
            for count in range(1, LAYOUTS[matrix] + 1):
                # The window of the last token begins with the last token of a block: see
                # model_matrix/prompts.py.
                first = window - 1 + count * size
                found |= {first - 1, first, first + 1}
    return [Transfer(f"n{n}", (Prompt(tokens(n)),)) for n in sorted(found) if n > 1]


def situations(cell: Cell, matrix: str) -> list[Transfer]:
    """Transfers that are about anything but the length of a prompt.

    b is the larger one of the block sizes.
    """
    b, n = max(_blocks(cell)), _long(cell)
    step = max(n // 3, 16)  # tokens of each prompt that P computes at a time
    less = n - (15 if has_state(cell) else b // 2)
    found = [
        Transfer(
            "two_at_once", (Prompt(tokens(less, shared=b + 5)), Prompt(tokens(n, seed=1, shared=b + 5)))
        ),
        # each step but the first has new blocks of two running requests, or of one of them alone
        Transfer("chunked", (Prompt(tokens(less)), Prompt(tokens(n, seed=1))), budget=step),
        Transfer("reused", (Prompt(tokens(n)), Prompt(tokens(max(n - b, 20), seed=1))), reuse=True),
        Transfer("preempted_on_p", (Prompt(tokens(n)),), budget=step, preempt="P"),
        Transfer("preempted_on_d", (Prompt(tokens(n)),), preempt="D"),
    ]
    if matrix != "quick" or not has_state(cell):
        # P has a block more than D loads, for the last token. Another load of the same step has no hit.
        end = n if has_state(cell) else 3 * b + 1
        warm = block_size(cell, "D") + 1 + dropped_tokens(cell, "D")
        prompts = Prompt(tokens(less)), Prompt(tokens(end, seed=1), warm=warm)
        found.append(Transfer("hit_of_one", prompts))
    more = [Transfer("p_generates_two", (Prompt(tokens(2 * b)),), generates=2)]
    # A state includes all that was computed, and cannot be shortened to the prompt.
    return found + hits(cell, matrix) + (more if matrix != "quick" and not has_state(cell) else [])


def hits(cell: Cell, matrix: str) -> list[Transfer]:
    """Transfers with hits in D's own prefix cache.

    One block is hit, or all but the last block; in the full matrix every depth in between, too. For each
    window there is also a hit that is longer than the window and reaches into the window of the last token:
    D has some of this window in its cache, and loads the rest. So it is with later turns of a long chat.
    """
    b, dropped = block_size(cell, "D"), dropped_tokens(cell, "D")
    n = _long(cell) + dropped
    most = (n - 1 - dropped) // b
    depths = range(1, most + 1) if matrix != "quick" and most <= 8 else sorted({1, most // 2, most} - {0})
    found = dict.fromkeys(depths, n)  # blocks of the hit -> tokens of the prompt
    for window in windows(cell):
        # Two whole blocks are loaded, so that a connector which leaves the last one to D loads one.
        found.setdefault(window // b + 1, window + 3 * b + 7)
    return [
        Transfer(f"hit{depth}", (Prompt(tokens(length), warm=depth * b + 1 + dropped),))
        for depth, length in found.items()
    ]


def one_token_a_step(cell: Cell) -> tuple[Transfer, Transfer]:
    """The transfer of a block and one token more, of which P computes one token a step, and D one in all.

    In the second of the two, vLLM replays these steps as full CUDA graphs.
    """
    prompts = (Prompt(tokens(block_size(cell, "P") + 1)),)
    return (
        Transfer("one_token_a_step", prompts, budget=1),
        Transfer("full_graphs", prompts, budget=1, graphs=True),
    )


@functools.cache
def transfers(cell: Cell, matrix: str) -> list[Transfer]:
    """All transfers of a cell."""
    return lengths(cell, matrix) + situations(cell, matrix)


def longest(cell: Cell, matrix: str) -> int:
    """Return the largest number of tokens of a request, with the tokens that D generates.

    All requests of one transfer count.
    """
    return (
        max(sum(len(prompt.tokens) for prompt in transfer.prompts) for transfer in transfers(cell, matrix))
        + 16
    )


def longest_length(cell: Cell, matrix: str) -> Transfer:
    """Return the transfer of the longest single prompt."""
    return max(lengths(cell, matrix), key=lambda transfer: len(transfer.prompts[0].tokens))


def has_window(cell: Cell) -> bool:
    """Whether layers have a sliding window, and keep no tokens before it: see `frees_windows`."""
    return frees_windows(cell) and bool(windows(cell))


def frees_windows(cell: Cell) -> bool:
    """Whether vLLM frees blocks before a sliding window, as it does with its hybrid memory allocator."""
    return all(side_of(cell, role).hma for role in "PD")


def windows(cell: Cell) -> list[int]:
    """Return the sizes of the sliding windows of a cell's layers, each size once."""
    return sorted(
        {
            kind.window
            for kind in load_geometries()[cell.family].kinds.values()
            if isinstance(kind, SlidingWindow)
        }
    )


def has_state(cell: Cell) -> bool:
    """Whether a layer keeps a recurrent state."""
    return any(isinstance(kind, State) for kind in load_geometries()[cell.family].kinds.values())


def _blocks(cell: Cell) -> list[int]:
    """Return the block sizes of P and D."""
    return sorted({block_size(cell, role) for role in "PD"})


def _long(cell: Cell) -> int:
    """Return a length of several blocks, the last one partly filled. Blocks that hold a state are large."""
    b = max(_blocks(cell))
    return b + 37 if has_state(cell) else 3 * b + b // 4 + 3
