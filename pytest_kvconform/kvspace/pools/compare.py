"""Comparison of the whole storage of a rank with its shadow, which holds the expected bytes.

The common case, no difference, is one pass of memcmp. Where bytes differ, attribute.py finds out which rows
they belong to, and classify.py where their words come from.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pytest_kvconform.kvspace.kinds import MOVED, NAMES, SAME
from pytest_kvconform.kvspace.pools.addresses import Array
from pytest_kvconform.kvspace.pools.attribute import Attribution
from pytest_kvconform.kvspace.pools.classify import RUN, known_rows
from pytest_kvconform.kvspace.pools.regions import Region

_STRETCH = 1 << 22  # bytes compared at a time when looking for any difference

Blocks = Mapping[str, Iterable[int]]
_libc = ctypes.CDLL(None)  # memcmp is the fastest way to see that nothing differs
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True)
class Cells:
    """One row of the picture: the worst kind in each block of a layer, in one plane or segment."""

    region: int  # index into PoolComparison.regions
    plane: int
    blocks: Array  # block ids in the order of the caller, then those that the caller did not name
    kinds: Array  # uint8, the same length


@dataclass(frozen=True)
class PoolComparison:
    """What differs in one rank's storage. Everything can be pickled."""

    regions: tuple[Region, ...]
    words: dict[int, int]  # kind -> words that differ
    # kind -> rows whose worst word is of this kind; a word outside of all rows counts as a row
    rows: dict[int, int]
    compared_bytes: int  # of rows in blocks that were due
    # RUN [n]: every row of the blocks that differ, the correct ones included; bounded by whole blocks.
    runs: Array = field(repr=False)
    raw: Array = field(repr=False)  # RAW [n], words outside of all rows; bounded
    cells: tuple[Cells, ...] = field(repr=False)  # rows of the picture with a difference
    rows_of_picture: int  # with and without difference
    due: dict[str, tuple[int, ...]]  # layer -> blocks in which something was due, in the order of the caller
    engine: int | None  # whose pool it is: 0 P, 1 D
    truncated: bool  # `runs` or `raw` had to be bounded; the counts never are

    @property
    def wrong(self) -> int:
        """Words that are not what they should be."""
        return sum(self.words.values())

    @property
    def worst(self) -> int:
        """The worst kind; SAME if nothing differs."""
        return max(self.words, default=SAME)

    def pairs(self, kind: int = MOVED) -> tuple[Array, Array, Array]:
        """(expected, found, number of words) of the runs of a kind: COORDINATES, COORDINATES, int."""
        runs = self.runs[self.runs["kind"] == kind]
        return runs["expected"], runs["found"], runs["words"]


def compare_pool(
    storage: Array,
    shadow: Array,
    regions: Sequence[Region],
    held: Blocks,
    *,
    due: Blocks | None = None,
    ignore: Array | None = None,
    others: Iterable[Region] = (),
    engine: int | None = None,
    most: int = 50_000,
    spans: Sequence[tuple[int, int]] = (),
) -> PoolComparison:
    """Compare `storage` with `shadow`, both uint8 [byte] of one rank.

    `held`    layer -> block ids (slots of a state) that belong to the layer's group now, in the order of the
              block table. Layers of different groups may share memory, and a block belongs to one at a time.
    `due`     the same for the blocks in which something had to arrive. In all other blocks each difference is
              collateral. Default: all that are held.
    `ignore`  a mask of bytes to leave out, bool [byte].
    `others`  regions of another rank or engine whose layers may turn up here (a draft layer that only P has).
    `engine`  whose pool it is, 0 P or 1 D: poison of the other one was copied.
    `most`    bounds the runs that are kept.
    `spans`   of bytes [start, end) that are compared; none: all.

    Raises ValueError if sizes do not fit, or if a layer holds blocks and has no region.
    """
    bytes_ = storage.ndim == 1 and storage.dtype == shadow.dtype == np.uint8
    if not bytes_ or storage.shape != shadow.shape:
        raise ValueError(
            f"storage {storage.shape} {storage.dtype} and shadow {shadow.shape} {shadow.dtype} "
            "are not equally many bytes"
        )
    held_ids = _ids(held)
    due_ids = held_ids if due is None else _ids(due)
    for layer in (held_ids.keys() | due_ids.keys()) - {region.layer for region in regions}:
        raise ValueError(f"{layer} holds blocks and has no region")
    none = np.zeros(0, dtype=np.int64)
    mask = _differences(storage, shadow, spans or [(0, len(storage))])
    if mask is None:
        mask = np.zeros(0, dtype=bool)
    elif ignore is not None:
        mask &= ~ignore
    known = known_rows([*regions, *others]) if len(mask) else none
    found = Attribution(storage, shadow, mask, tuple(regions), due_ids, known, most)
    if len(mask):
        owned = np.unique(np.concatenate([none, *held_ids.values()]))
        for index, region in enumerate(regions):
            found.in_held_blocks(index, np.unique(held_ids.get(region.layer, none)))
        for index, region in enumerate(regions):
            found.in_unowned_blocks(index, np.setdiff1d(np.arange(region.shape[0]), owned))
        found.outside_of_rows()
        found.bound_runs(slack=1)
    return PoolComparison(
        regions=tuple(regions),
        words=_by_kind(found.words),
        rows=_by_kind(found.rows),
        compared_bytes=_compared_bytes(regions, due_ids),
        runs=np.concatenate([np.zeros(0, dtype=RUN), *found.runs]),
        raw=found.raw,
        cells=_cells(found, held_ids),
        rows_of_picture=sum(
            (region.shape[3] if region.kind == "attention" else 1)
            for region in regions
            if len(held_ids.get(region.layer, none))
        ),
        due=_as_tuples(due_ids),
        engine=engine,
        truncated=found.truncated,
    )


def _ids(held: Blocks) -> dict[str, Array]:
    """Layer -> block ids. Layers that share their blocks in `held` share the array."""
    shared: dict[int, Array] = {}
    for blocks in held.values():
        if id(blocks) not in shared:
            listed = blocks if isinstance(blocks, np.ndarray) else list(blocks)
            shared[id(blocks)] = np.asarray(listed, dtype=np.int64).reshape(-1)
    return {layer: shared[id(blocks)] for layer, blocks in held.items()}


def _differences(storage: Array, shadow: Array, spans: Sequence[tuple[int, int]]) -> Array | None:
    """bool [byte], or None if all is equal: the common case takes one pass and no memory."""
    parts = [(at, min(at + _STRETCH, end)) for start, end in spans for at in range(start, end, _STRETCH)]
    one, other = storage.ctypes.data, shadow.ctypes.data
    if not (storage.flags.c_contiguous and shadow.flags.c_contiguous):
        raise ValueError("storage and shadow must be contiguous")
    wrong = [(at, end) for at, end in parts if _libc.memcmp(one + at, other + at, end - at)]
    if not wrong:
        return None
    mask = np.zeros(len(storage), dtype=bool)  # pages without a difference are never touched
    for at, end in wrong:
        np.not_equal(storage[at:end], shadow[at:end], out=mask[at:end])
    return mask


def _compared_bytes(regions: Sequence[Region], due: dict[str, Array]) -> int:
    """Bytes of rows in blocks that were due. Layers of a group share the array of their blocks."""
    blocks = {id(ids): len(np.unique(ids)) for ids in due.values()}
    return sum(
        math.prod(region.shape[1:]) * blocks[id(due[region.layer])]
        for region in regions
        if region.layer in due
    )


def _by_kind(counts: Array) -> dict[int, int]:
    return {kind: int(counts[kind]) for kind in NAMES if counts[kind]}


def _cells(found: Attribution, held: dict[str, Array]) -> tuple[Cells, ...]:
    cells = []
    for (index, plane), worst in sorted(found.worst.items()):
        if any(kind > SAME for kind in worst.values()):
            blocks = held.get(found.regions[index].layer, np.zeros(0)).tolist()
            order = list(dict.fromkeys([*blocks, *sorted(worst)]))
            kinds = np.array([worst.get(block, SAME) for block in order], dtype=np.uint8)
            cells.append(Cells(index, plane, np.array(order), kinds))
    return tuple(cells)


def _as_tuples(blocks: dict[str, Array]) -> dict[str, tuple[int, ...]]:
    """Layers of a group share the array of their blocks, and here the tuple: it is pickled once."""
    shared = {id(ids): tuple(ids.tolist()) for ids in blocks.values()}
    return {layer: shared[id(ids)] for layer, ids in blocks.items()}
