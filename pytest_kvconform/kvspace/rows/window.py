"""Gaps in a sliding window: tokens that D's next forward reads, and for which D has the null block."""

from __future__ import annotations

import numpy as np

from pytest_kvconform.kvspace.kinds import MISSING
from pytest_kvconform.kvspace.rows.compare import RowComparison
from pytest_kvconform.kvspace.window import Gap, describe_gap


def missing_window(comparison: RowComparison) -> Gap | None:
    """The gap in the windows of a request, or None. Of different windows the last one is described."""
    layers: list[str] = []
    missing: set[int] = set()
    block_size = window = position = 0
    for due in comparison.due:
        gone = np.flatnonzero((comparison.kinds[due.layer] == MISSING).any(axis=(1, 2, 3)))
        if due.window and len(gone):
            layers.append(due.layer)
            missing |= set(gone.tolist())
            block_size, window, position = due.block_size, due.window, due.end
    return describe_gap(layers, missing, window, position, block_size) if missing else None
