"""Compare rows of KV in logical coordinates and classify each: same, missing, never written, zeroed, moved, garbled.

A row is what one token leaves in one layer for one KV head and one plane (K or V): `width` words. Rows of a real model are all different,
so a row that is not where it should be can be found where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

# Kinds of a row, from harmless to worst.
NOT_DUE, SAME, MISSING, UNWRITTEN, ZEROED, MOVED, GARBLED = range(7)
NAMES = {
    MISSING: "not in the cache",
    UNWRITTEN: "never written",
    ZEROED: "zero",
    MOVED: "moved",
    GARBLED: "garbled",
}
PLANES = "KV"


@dataclass(frozen=True)
class Due:
    """What one layer owes: the rows that the next forward will read."""

    layer: str
    first: int  # tokens [first, end) are due
    end: int
    block_size: int  # tokens
    window: int  # tokens of the sliding window; 0: all


@dataclass(frozen=True)
class Address:
    """Where a row belongs."""

    layer: str
    token: int
    head: int
    plane: int  # index into PLANES

    def __str__(self) -> str:
        return f"{self.layer} {PLANES[self.plane]} token {self.token} head {self.head}"


@dataclass(frozen=True)
class Comparison:
    """The result for one request. `kinds` has one array [token, head, plane] per layer."""

    due: tuple[Due, ...]
    kinds: dict[str, np.ndarray]
    moves: tuple[tuple[Address, Address], ...]  # (where it stands, where it belongs), of the moved rows
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
) -> Comparison:
    """Compare `got` with `want`, both layer -> [token, head, plane, word] of unsigned words, on the rows that are due.

    `present` is layer -> [token]: False where the block table has the null block. `poison` is the byte that fills blocks of nobody.
    """
    kinds: dict[str, np.ndarray] = {}
    compared = 0
    for layer in due:
        a, b = want[layer.layer], got[layer.layer]
        if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
            raise ValueError(
                f"{layer.layer}: rows of {a.shape[1:]} {a.dtype} cannot be compared with rows of {b.shape[1:]} {b.dtype}"
            )
        kind = np.full(b.shape[:3], NOT_DUE, dtype=np.uint8)
        span = slice(layer.first, layer.end)
        kind[span] = np.where((a[span] == b[span]).all(axis=-1), SAME, GARBLED)
        wrong = kind == GARBLED
        raw = np.ascontiguousarray(b).view(np.uint8).reshape(*b.shape[:3], b.shape[3] * b.itemsize)
        kind[wrong & (raw == poison).all(axis=-1)] = UNWRITTEN
        kind[wrong & (raw == 0).all(axis=-1)] = ZEROED
        absent = np.zeros(len(kind), dtype=bool)
        absent[span] = ~present[layer.layer][span]
        kind[absent] = MISSING
        kinds[layer.layer] = kind
        compared += int(((kind != NOT_DUE) & (kind != MISSING)).sum()) * b.shape[3] * b.itemsize
    return Comparison(due, kinds, _find_moved(kinds, want, got), compared)


def _find_moved(
    kinds: dict[str, np.ndarray], want: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray]
) -> tuple[tuple[Address, Address], ...]:
    """Turn GARBLED into MOVED where the row is one of `want`, bit for bit. Marks `kinds` in place; returns (stands, belongs) pairs."""
    strays = [
        (name, *at)
        for name, kind in kinds.items()
        for at in zip(*(axis.tolist() for axis in np.nonzero(kind == GARBLED)), strict=True)
    ]
    if not strays:
        return ()
    home: dict[bytes, Address] = {}
    for name, rows in want.items():
        for token, head, plane in np.ndindex(rows.shape[:3]):
            home.setdefault(rows[token, head, plane].tobytes(), Address(name, token, head, plane))
    moves = []
    for name, token, head, plane in strays:
        origin = home.get(got[name][token, head, plane].tobytes())
        if origin is not None:
            kinds[name][token, head, plane] = MOVED
            moves.append((Address(name, token, head, plane), origin))
    return tuple(moves)


SEGMENTS = ("convolution Q", "convolution K", "convolution V", "recurrent state")


def compare_state(
    want: Mapping[str, tuple[np.ndarray, ...]], got: Mapping[str, tuple[np.ndarray, ...]], poison: int
) -> tuple[int, list[tuple[str, str, int, int, int]]]:
    """Compare recurrent states. Returns (bytes compared, differences as (layer, segment, kind, channels that differ, channels))."""
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
