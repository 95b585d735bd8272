"""Comparison of D's rows with P's, in logical coordinates; and of recurrent states.

Each row gets a kind: same, missing, never written, zero, moved or garbled (kvspace/kinds.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pytest_kvconform.kvspace.kinds import (
    GARBLED,
    MISSING,
    MOVED,
    NOT_DUE,
    PLANES,
    SAME,
    SEGMENTS,
    UNWRITTEN,
    ZEROED,
)


@dataclass(frozen=True)
class Due:
    """The rows of one layer that D's next forward will read."""

    layer: str
    first: int  # tokens [first, end) are due
    end: int
    block_size: int  # tokens
    window: int  # tokens of the sliding window; 0: all


@dataclass(frozen=True)
class Address:
    """The coordinates of a row."""

    layer: str
    token: int
    head: int
    plane: int  # index into PLANES

    def __str__(self) -> str:
        return f"{self.layer} {PLANES[self.plane]} token {self.token} head {self.head}"


@dataclass(frozen=True)
class RowComparison:
    """The result for one request. Everything can be pickled."""

    due: tuple[Due, ...]
    kinds: dict[str, np.ndarray]  # layer -> kind of each row: uint8 [token, head, copy, plane]
    moves: tuple[tuple[Address, Address], ...]  # (where the row is, whose row it is) of each moved row
    compared_bytes: int  # bytes of rows that were due and present

    def count(self, kind: int) -> int:
        """Rows of a kind."""
        return sum(int((kinds == kind).sum()) for kinds in self.kinds.values())

    @property
    def rows_due(self) -> int:
        return sum(int((kinds != NOT_DUE).sum()) for kinds in self.kinds.values())

    @property
    def wrong(self) -> int:
        """Rows that are present and differ."""
        return sum(self.count(kind) for kind in (UNWRITTEN, ZEROED, MOVED, GARBLED))


def compare_rows(
    due: tuple[Due, ...],
    want: Mapping[str, np.ndarray],
    got: Mapping[str, np.ndarray],
    present: Mapping[str, np.ndarray],
    poison: int,
) -> RowComparison:
    """Compare the rows of `got` that are due with `want`, both layer -> [token, head, plane, word], unsigned.

    A head that several ranks hold has a row for each copy in `got`, side by side: copy c of head h is that of
    rank h * copies + c. `present` is layer -> [token]: False where the block table has the null block.
    `poison` is the byte with which the harness fills unowned blocks. Raises ValueError if rows of P and D
    differ in shape or type.
    """
    kinds: dict[str, np.ndarray] = {}
    held: dict[str, np.ndarray] = {}  # of `got`: [token, head, copy, plane, word]
    compared = 0
    for layer in due:
        a, b = want[layer.layer], got[layer.layer]
        heads = a.shape[1]
        if b.shape[1] % heads or a.shape[2:] != b.shape[2:] or a.dtype != b.dtype:
            raise ValueError(
                f"{layer.layer}: rows of {a.shape[1:]} {a.dtype} cannot be compared with rows of "
                f"{b.shape[1:]} {b.dtype}"
            )
        held[layer.layer] = b = b.reshape(len(b), heads, b.shape[1] // heads, *b.shape[2:])
        kind = np.full(b.shape[:-1], NOT_DUE, dtype=np.uint8)
        span = slice(layer.first, layer.end)
        kind[span] = np.where((a[span, :, None] == b[span]).all(axis=-1), SAME, GARBLED)
        wrong = kind == GARBLED
        raw = np.ascontiguousarray(b).view(np.uint8).reshape(*b.shape[:-1], b.shape[-1] * b.itemsize)
        kind[wrong & (raw == poison).all(axis=-1)] = UNWRITTEN
        kind[wrong & (raw == 0).all(axis=-1)] = ZEROED
        absent = np.zeros(len(kind), dtype=bool)
        absent[span] = ~present[layer.layer][span]
        kind[absent] = MISSING
        kinds[layer.layer] = kind
        compared += int(((kind != NOT_DUE) & (kind != MISSING)).sum()) * b.shape[-1] * b.itemsize
    return RowComparison(due, kinds, _find_moved(kinds, want, held), compared)


def _find_moved(
    kinds: dict[str, np.ndarray], want: Mapping[str, np.ndarray], held: Mapping[str, np.ndarray]
) -> tuple[tuple[Address, Address], ...]:
    """Change GARBLED to MOVED, in `kinds`, where the row is another row of `want`, bit for bit.

    Returns (where the row is, whose row it is) of each, and so of each copy. Of equal rows in `want` the
    first one counts.
    """
    unexplained = [
        (name, *at)
        for name, kind in kinds.items()
        for at in zip(*(axis.tolist() for axis in np.nonzero(kind == GARBLED)), strict=True)
    ]
    if not unexplained:
        return ()
    addresses: dict[bytes, Address] = {}
    for name, rows in want.items():
        for token, head, plane in np.ndindex(rows.shape[:3]):
            addresses.setdefault(rows[token, head, plane].tobytes(), Address(name, token, head, plane))
    moves = []
    for name, token, head, copy, plane in unexplained:
        origin = addresses.get(held[name][token, head, copy, plane].tobytes())
        if origin is not None:
            kinds[name][token, head, copy, plane] = MOVED
            moves.append((Address(name, token, head, plane), origin))
    return tuple(moves)


def compare_state(
    want: Mapping[str, tuple[np.ndarray, ...]], got: Mapping[str, tuple[np.ndarray, ...]], poison: int
) -> tuple[int, list[tuple[str, str, int, int, int]]]:
    """Compare recurrent states, layer -> segments.

    Returns the number of compared bytes, and of each segment that differs (layer, name of the segment, kind,
    channels that differ, channels).
    """
    compared, wrong = 0, []
    for layer, segments in want.items():
        for index, (a, b) in enumerate(zip(segments, got[layer], strict=True)):
            name = SEGMENTS[index] if len(segments) == len(SEGMENTS) else f"segment {index}"
            compared += b.nbytes
            differ = (a != b).reshape(len(b), -1).any(axis=1)
            if differ.any():
                raw = np.ascontiguousarray(b).view(np.uint8)
                kind = UNWRITTEN if (raw == poison).all() else ZEROED if not raw.any() else GARBLED
                wrong.append((layer, name, kind, int(differ.sum()), len(b)))
    return compared, wrong
