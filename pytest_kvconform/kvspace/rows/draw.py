"""A picture of a `RowComparison`: a line for each layer and plane, a column for each logical block."""

from __future__ import annotations

import numpy as np

from pytest_kvconform.kvspace.kinds import (
    GARBLED,
    LETTERS,
    MISSING,
    MOVED,
    PLANES,
    SAME,
    UNWRITTEN,
    ZEROED,
    legend,
    short_name,
)
from pytest_kvconform.kvspace.rows.compare import RowComparison

MOST_ROWS, MOST_COLUMNS = 18, 32


def draw_rows(comparison: RowComparison) -> tuple[str, ...]:
    """At most 21 lines. A cell is the worst row of a block; lines without a difference are only counted."""
    lines: list[str] = []
    correct = hidden = width = 0
    for due in comparison.due:
        kinds = comparison.kinds[due.layer]
        blocks = -(-len(kinds) // due.block_size)
        for plane in range(kinds.shape[-1]):
            worst = [
                int(kinds[b * due.block_size : (b + 1) * due.block_size, ..., plane].max(initial=0))
                for b in range(blocks)
            ]
            if max(worst) <= SAME:
                correct += 1
                continue
            if len(lines) == MOST_ROWS:
                hidden += 1
                continue
            first = (
                max(0, int(np.argmax(np.array(worst) > SAME)) - MOST_COLUMNS // 2)
                if blocks > MOST_COLUMNS
                else 0
            )
            cells = worst[first : first + MOST_COLUMNS]
            width = max(width, first + len(cells))
            lines.append(
                f"  {short_name(due.layer):<22} {PLANES[plane] if kinds.shape[-1] > 1 else ' '}  "
                + "   " * first
                + " ".join(f"{LETTERS[k]:>2}" for k in cells)
            )
    if not lines:
        return ()
    header = f"  {'logical block':<22}    " + " ".join(f"{b:>2}" for b in range(width))
    tail = [
        f"  ({correct} of {correct + len(lines) + hidden} rows are correct"
        + (f", {hidden} more are not shown)" if hidden else ")")
    ]
    key = legend(SAME, MISSING, UNWRITTEN, ZEROED, MOVED, GARBLED)
    return (header, *lines, *(tail if correct or hidden else []), f"  {key}")
