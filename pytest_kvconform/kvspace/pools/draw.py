"""A picture of a `PoolComparison` as text.

Its rows are layer and plane or segment, its columns the blocks that the layer holds, in the order of the
block table.
"""

from __future__ import annotations

import numpy as np

from pytest_kvconform.kvspace.kinds import (
    COLLATERAL,
    GARBLED,
    LETTERS,
    MOVED,
    PLANES,
    SAME,
    UNWRITTEN,
    ZEROED,
    legend,
    short_name,
)
from pytest_kvconform.kvspace.pools.compare import Cells, PoolComparison
from pytest_kvconform.kvspace.pools.regions import Region

SEGMENT_LETTERS = "QKVS"  # convolution Q, K, V and the recurrent state
MOST_ROWS, MOST_COLUMNS = 16, 24


def draw_pool(comparison: PoolComparison) -> tuple[str, ...]:
    """At most 20 lines. A cell is the worst row of a block; lines without a difference are only counted.

    Consecutive rows with the same blocks share one header: the line of block ids is repeated only where it
    changes.
    """
    if not comparison.wrong:
        return ()
    lines: list[str] = []
    header: list[int] = []
    shown = 0
    for cells in comparison.cells:
        first = _first_column(cells)
        blocks = cells.blocks[first : first + MOST_COLUMNS].tolist()
        if len(lines) + (1 if blocks == header else 2) > MOST_ROWS:
            break
        if blocks != header:
            more = f"  ({len(cells.blocks)} blocks)" if len(cells.blocks) > len(blocks) else ""
            lines.append(f"  {'block':<25} " + " ".join(f"{block:>3}" for block in blocks) + more)
            header = blocks
        kinds = cells.kinds[first : first + MOST_COLUMNS].tolist()
        lines.append(
            f"  {_label(comparison.regions[cells.region], cells.plane)} "
            + " ".join(f"{LETTERS[kind]:>3}" for kind in kinds)
        )
        shown += 1
    if len(comparison.raw):
        at = comparison.raw[0]
        where = (
            f"block {at['block']} byte {at['within']} of its page"
            if at["block"] >= 0
            else f"byte {at['offset']}"
        )
        lines.append(
            f"  in no layer's rows: {len(comparison.raw)} words written where nothing was due, "
            f"the first at {where}"
        )
    hidden = len(comparison.cells) - shown
    correct = max(0, comparison.rows_of_picture - len(comparison.cells))
    lines.append(f"  ({correct} rows are correct" + (f", {hidden} more are not shown)" if hidden else ")"))
    return (*lines, f"  {legend(SAME, UNWRITTEN, ZEROED, MOVED, GARBLED, COLLATERAL)}")


def _first_column(cells: Cells) -> int:
    """The first column to draw. Of too many, the first one with a difference is about in the middle."""
    if len(cells.blocks) <= MOST_COLUMNS:
        return 0
    return min(
        max(0, int(np.argmax(cells.kinds > SAME)) - MOST_COLUMNS // 2), len(cells.blocks) - MOST_COLUMNS
    )


def _label(region: Region, plane: int) -> str:
    letters = PLANES if region.kind == "attention" else SEGMENT_LETTERS
    return f"{short_name(region.layer):<22}  {letters[plane]}"
