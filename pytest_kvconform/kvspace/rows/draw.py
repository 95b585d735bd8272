"""A picture of a comparison as text. Rows: layer and plane. Columns: logical blocks of the request."""

from __future__ import annotations

import numpy as np

from pytest_kvconform.kvspace.rows.compare import (
    GARBLED,
    MISSING,
    MOVED,
    NOT_DUE,
    PLANES,
    SAME,
    UNWRITTEN,
    ZEROED,
    Comparison,
)

LETTERS = {NOT_DUE: " ", SAME: ".", MISSING: "?", UNWRITTEN: "-", ZEROED: "0", MOVED: "M", GARBLED: "x"}
LEGEND = ". right  ? not in the cache  - never written  0 zero  M moved  x garbled"
MOST_ROWS, MOST_COLUMNS = 18, 32


def draw(comparison: Comparison) -> tuple[str, ...]:
    """Lines of text, each cell the worst row of its block; rows that are all right are counted, not shown. At most 20 lines."""
    lines: list[str] = []
    right = hidden = width = 0
    for due in comparison.due:
        kinds = comparison.kinds[due.layer]
        blocks = -(-len(kinds) // due.block_size)
        for plane in range(kinds.shape[2]):
            worst = [
                int(kinds[b * due.block_size : (b + 1) * due.block_size, :, plane].max(initial=0))
                for b in range(blocks)
            ]
            if max(worst) <= SAME:
                right += 1
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
                f"  {_short(due.layer):<22} {PLANES[plane]}  "
                + "   " * first
                + " ".join(f"{LETTERS[k]:>2}" for k in cells)
            )
    if not lines:
        return ()
    header = f"  {'logical block':<22}    " + " ".join(f"{b:>2}" for b in range(width))
    tail = [
        f"  ({right} of {right + len(lines) + hidden} rows are all right"
        + (f", {hidden} more are not shown)" if hidden else ")")
    ]
    return (header, *lines, *(tail if right or hidden else []), f"  {LEGEND}")


def _short(layer: str) -> str:
    """ "layers.3.self_attn" for "model.layers.3.self_attn.attn"."""
    return layer.removeprefix("language_model.").removeprefix("model.").removesuffix(".attn")[:22]
