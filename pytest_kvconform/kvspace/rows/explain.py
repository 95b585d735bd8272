"""From moved rows to one sentence: what the mistake does to the coordinates. The more exact sentence comes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from pytest_kvconform.kvspace.rows.compare import (
    MISSING,
    NAMES,
    PLANES,
    UNWRITTEN,
    ZEROED,
    Address,
    Comparison,
)


def explain(comparison: Comparison) -> str:
    """One sentence on why rows are likely wrong; empty when none is."""
    if not comparison.wrong:
        return ""
    if comparison.moves:
        return explain_moves(comparison.moves, comparison.wrong)
    where = _where(comparison)
    for kind, sentence in ((UNWRITTEN, "was never written"), (ZEROED, "holds zeros")):
        if comparison.count(kind) == comparison.wrong:
            return f"{where} {sentence}"
    return f"{where} holds bytes that stand nowhere in the prefiller's cache"


def explain_moves(moves: Iterable[tuple[Address, Address]], wrong: int) -> str:
    """Sentences on (where it stands, where it belongs) pairs, one per coordinate that is not kept."""
    moves = list(moves)
    share = f"all {len(moves)} rows" if len(moves) == wrong else f"{len(moves)} of {wrong} wrong rows"
    said = []
    shifts = Counter(origin.token - here.token for here, origin in moves)
    if set(shifts) != {0}:
        said.append(_shift("token", shifts, share))
    if any(here.plane != origin.plane for here, origin in moves):
        both = {(here.plane, origin.plane) for here, origin in moves}
        said.append(
            "K and V are exchanged"
            if both == {(0, 1), (1, 0)}
            else f"rows of {' and '.join(sorted({PLANES[o.plane] for h, o in moves if h.plane != o.plane}))} stand in the other plane"
        )
    heads = {(here.head, origin.head) for here, origin in moves}
    if any(a != b for a, b in heads):
        said.append(_permutation("head", heads))
    layers = {(here.layer, origin.layer) for here, origin in moves}
    if any(a != b for a, b in layers):
        pairs = sorted((a, b) for a, b in layers if a != b)
        said.append(
            f"{pairs[0][0]} holds rows of {pairs[0][1]}"
            + (f" (and {len(pairs) - 1} more layers are mixed up)" if pairs[1:] else "")
        )
    return f"in {share}: " + "; ".join(said)


def _shift(field: str, shifts: Counter[int], share: str) -> str:
    if len(shifts) == 1:
        (shift,) = shifts
        return f"{field} is off by {shift:+d}"
    common, count = shifts.most_common(1)[0]
    return f"{field} is mixed up ({len(shifts)} different distances, most often {common:+d}, {count} times)"


def _permutation(field: str, pairs: set[tuple[int, int]]) -> str:
    moved = sorted((a, b) for a, b in pairs if a != b)
    low, high = moved[0]
    if set(moved) == {(low, high), (high, low)}:
        return f"{field} {low} and {field} {high} are exchanged"
    return (
        f"{field}s are mixed up ("
        + ", ".join(f"{a} holds {b}" for a, b in moved[:4])
        + (", …)" if moved[4:] else ")")
    )


def _where(comparison: Comparison) -> str:
    """ "tokens 32-63 of all 4 layers" or "tokens 3, 7-9 of model.layers.1"."""
    tokens, layers, planes, heads = set(), [], set(), set()
    total_heads = 0
    for name, kinds in comparison.kinds.items():
        wrong = kinds > MISSING
        if wrong.any():
            layers.append(name)
            at = np.argwhere(wrong)
            tokens |= set(at[:, 0].tolist())
            heads |= set(at[:, 1].tolist())
            planes |= set(at[:, 2].tolist())
            total_heads = kinds.shape[1]
    which = (
        f"all {len(layers)} layers"
        if len(layers) == len(comparison.kinds) > 1
        else ", ".join(layers[:3]) + (", …" if layers[3:] else "")
    )
    detail = (f", {' and '.join(PLANES[p] for p in sorted(planes))} only" if len(planes) == 1 else "") + (
        f", head {intervals(heads)} only" if len(heads) < total_heads else ""
    )
    return f"token{'s' if len(tokens) > 1 else ''} {intervals(tokens)} of {which}{detail}"


def intervals(numbers: Iterable[int]) -> str:
    """ "3-17, 40" for {3, …, 17, 40}."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def count_sentence(comparison: Comparison) -> str:
    """ "64 of 4096 rows differ: 60 never written, 4 moved"."""
    wrong = sum(comparison.count(kind) for kind in NAMES)
    said = ", ".join(
        f"{comparison.count(kind)} {name}" for kind, name in NAMES.items() if comparison.count(kind)
    )
    return f"{wrong} of {comparison.rows_due} rows differ: {said}"
