"""A picture of a compared pool as text. Rows: layer and plane or segment. Columns: the blocks that the layer holds, in table order."""

from __future__ import annotations

import numpy as np

from pytest_kvconform.kvspace.pools.classify import COLLATERAL
from pytest_kvconform.kvspace.pools.compare import Cells, PoolComparison
from pytest_kvconform.kvspace.pools.regions import Region
from pytest_kvconform.kvspace.rows.compare import GARBLED, MOVED, PLANES, SAME, UNWRITTEN, ZEROED

LETTERS = {SAME: ".", UNWRITTEN: "-", ZEROED: "0", MOVED: "M", GARBLED: "x", COLLATERAL: "!"}
LEGEND = ". right  - never written  0 zero  M moved  x garbled  ! written where nothing was due"
SEGMENTS = ("Q", "K", "V", "S")  # convolution Q, K, V and the recurrent state
MOST_ROWS, MOST_COLUMNS = 16, 24


def draw_pool(comparison: PoolComparison) -> tuple[str, ...]:
    """At most 20 lines. A cell is the worst row of a block; rows of the picture that are all right are counted and not shown.

    Consecutive rows with the same blocks share one header, so the line of block ids is repeated only where it changes.
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
            f"  in no layer's rows: {len(comparison.raw)} words written where nothing was due, the first at {where}"
        )
    hidden = len(comparison.cells) - shown
    right = max(0, comparison.rows_of_picture - len(comparison.cells))
    lines.append(f"  ({right} rows are all right" + (f", {hidden} more are not shown)" if hidden else ")"))
    return (*lines, f"  {LEGEND}")


def _first_column(cells: Cells) -> int:
    """Where to begin when there are too many columns: the first wrong one about in the middle."""
    if len(cells.blocks) <= MOST_COLUMNS:
        return 0
    return min(
        max(0, int(np.argmax(cells.kinds > SAME)) - MOST_COLUMNS // 2), len(cells.blocks) - MOST_COLUMNS
    )


def _label(region: Region, plane: int) -> str:
    name = region.layer.removeprefix("language_model.").removeprefix("model.").removesuffix(".attn")[:22]
    return f"{name:<22}  {(PLANES if region.kind == 'attention' else SEGMENTS)[plane]}"
