"""One sentence on a `RowComparison`: where rows are wrong, and what the mistake did to their coordinates."""

from __future__ import annotations

from collections import Counter

import numpy as np

from pytest_kvconform.kvspace.kinds import MISSING, NAMES, PLANES, UNWRITTEN, ZEROED, intervals, permutation
from pytest_kvconform.kvspace.rows.compare import RowComparison


def diagnose_rows(comparison: RowComparison) -> str:
    """The likely reason why rows are wrong; empty if none is. Missing rows do not count: see window.py."""
    if not comparison.wrong:
        return ""
    if comparison.moves:
        return _moved(comparison)
    where = _where(comparison)
    for kind, sentence in ((UNWRITTEN, "was never written"), (ZEROED, "holds zeros")):
        if comparison.count(kind) == comparison.wrong:
            return f"{where} {sentence}"
    return f"{where} holds bytes of no row that the prefiller has of this request"


def _moved(comparison: RowComparison) -> str:
    """A part of a sentence for each coordinate that moved rows did not keep."""
    moves, wrong = comparison.moves, comparison.wrong
    share = f"all {len(moves)} rows" if len(moves) == wrong else f"{len(moves)} of {wrong} wrong rows"
    share += _ranks(comparison)
    changes = []
    shifts = Counter(origin.token - here.token for here, origin in moves)
    if set(shifts) != {0}:
        changes.append(_shift("token", shifts))
    if any(here.plane != origin.plane for here, origin in moves):
        both = {(here.plane, origin.plane) for here, origin in moves}
        planes = " and ".join(sorted({PLANES[o.plane] for h, o in moves if h.plane != o.plane}))
        exchanged = both == {(0, 1), (1, 0)}
        changes.append("K and V are exchanged" if exchanged else f"rows of {planes} are in the other plane")
    heads = {(here.head, origin.head) for here, origin in moves}
    if any(a != b for a, b in heads):
        changes.append(permutation("head", heads))
    layers = {(here.layer, origin.layer) for here, origin in moves}
    if any(a != b for a, b in layers):
        pairs = sorted((a, b) for a, b in layers if a != b)
        changes.append(
            f"{pairs[0][0]} holds rows of {pairs[0][1]}"
            + (f" (and {len(pairs) - 1} more layers are mixed up)" if pairs[1:] else "")
        )
    return f"in {share}: " + "; ".join(changes)


def _shift(field: str, shifts: Counter[int]) -> str:
    if len(shifts) == 1:
        (shift,) = shifts
        return f"{field} is off by {shift:+d}"
    common, count = shifts.most_common(1)[0]
    return f"{field} is mixed up ({len(shifts)} different distances, most often {common:+d}, {count} times)"


def _where(comparison: RowComparison) -> str:
    """ "tokens 32-63 of all 4 layers" or "tokens 3, 7-9 of model.layers.1"."""
    tokens, layers, planes, heads = set(), [], set(), set()
    total_heads = total_planes = 0
    for name, kinds in comparison.kinds.items():
        wrong = kinds > MISSING
        if wrong.any():
            layers.append(name)
            at = np.argwhere(wrong)
            tokens |= set(at[:, 0].tolist())
            heads |= set(at[:, 1].tolist())
            planes |= set(at[:, 3].tolist())
            total_heads = max(total_heads, kinds.shape[1])
            total_planes = max(total_planes, kinds.shape[3])
    which = (
        f"all {len(layers)} layers"
        if len(layers) == len(comparison.kinds) > 1
        else ", ".join(layers[:3]) + (", …" if layers[3:] else "")
    )
    detail = f", {PLANES[min(planes)]} only" if len(planes) < total_planes else ""
    detail += f", head {intervals(heads)} only" if len(heads) < total_heads else ""
    detail += _ranks(comparison)
    return f"token{'s' if len(tokens) > 1 else ''} {intervals(tokens)} of {which}{detail}"


def _ranks(comparison: RowComparison) -> str:
    """ ", rank 1 only": the ranks with wrong rows; "" if other ranks have no right copies of these rows."""
    ranks, holders = set(), set()
    for kinds in comparison.kinds.values():
        copies = kinds.shape[2]
        for head, copy in np.argwhere((kinds > MISSING).any(axis=(0, 3))).tolist():
            if copies == 1:
                return ""
            ranks.add(head * copies + copy)
            holders |= set(range(head * copies, (head + 1) * copies))
    return f", rank {intervals(ranks)} only" if ranks < holders else ""


def count_rows(comparison: RowComparison) -> str:
    """ "64 of 4096 rows differ: 60 never written, 4 moved"."""
    counts = {name: comparison.count(kind) for kind, name in NAMES.items()}
    parts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{sum(counts.values())} of {comparison.rows_due} rows differ: {parts}"
