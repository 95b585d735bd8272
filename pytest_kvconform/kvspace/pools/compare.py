"""Compare the whole storage of a rank with what it should hold, byte by byte, and say for each wrong word where it came from. NumPy only.

Layers of different KV cache groups may lie in the same memory; a block id belongs to one group at a time. The caller therefore says which
blocks each layer holds, and a difference is put down to the layer that holds the block. What is left, in blocks that nobody holds and in
the padding of pages, was changed although nothing was due there.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pytest_kvconform.kvspace.pools.classify import (
    COLLATERAL,
    RUN,
    classify_rows,
    in_one_piece,
    known_rows,
    runs_of,
)
from pytest_kvconform.kvspace.pools.regions import COORDINATES, FOREIGN, Array, Region, decode
from pytest_kvconform.kvspace.rows.compare import GARBLED, MOVED, SAME, UNWRITTEN, ZEROED

KINDS = {
    SAME: "right",
    UNWRITTEN: "never written",
    ZEROED: "zero",
    MOVED: "moved",
    GARBLED: "garbled",
    COLLATERAL: "written where nothing was due",
}
# A word, 8 bytes at a multiple of 8, that no region's rows explain: in the padding of a page or outside of all pages (then -1). `within` is
# bytes from the beginning of the region's page to the first byte that differs.
RAW = np.dtype(
    [("offset", "i8"), ("region", "i2"), ("block", "i4"), ("within", "i8"), ("holds", COORDINATES)]
)
_AT_ONCE = 1 << 17  # words classified at a time
_STRETCH = 1 << 22  # bytes compared at a time when looking for any difference

Blocks = Mapping[str, Iterable[int]]
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
)  # the fastest way to see that nothing differs


@dataclass(frozen=True)
class Cells:
    """One row of the picture: the worst kind in each block that a layer holds, of one plane (attention) or one segment (state)."""

    region: int  # index into PoolComparison.regions
    plane: int
    blocks: Array  # block ids as the caller ordered them, then those that it did not name
    kinds: Array  # uint8, the same length


@dataclass(frozen=True)
class PoolComparison:
    """What was found in one rank's storage. Everything can be pickled."""

    regions: tuple[Region, ...]
    words: dict[int, int]  # kind -> words that differ
    rows: dict[int, int]  # kind -> rows whose worst word is of this kind; raw words count as rows
    compared_bytes: int  # of rows in blocks that were due
    runs: Array = field(
        repr=False
    )  # RUN [n]: every row of the blocks that differ, the right ones included; bounded by whole blocks
    raw: Array = field(repr=False)  # RAW [n], bounded
    cells: tuple[Cells, ...] = field(repr=False)  # of rows of the picture with a difference
    rows_of_picture: int  # with and without difference
    due: dict[str, tuple[int, ...]]  # layer -> blocks in which something was due, in the caller's order
    engine: int | None  # whose pool it is: 0 P, 1 D
    truncated: bool  # runs or raw had to be bounded; the counts never are

    @property
    def wrong(self) -> int:
        """Words that are not what they should be."""
        return sum(self.words.values())

    @property
    def worst(self) -> int:
        """The worst kind found; SAME if nothing differs."""
        return max(self.words, default=SAME)

    def pairs(self, kind: int = MOVED) -> tuple[Array, Array, Array]:
        """(where it stands, where it belongs, how many words) of the runs of a kind: COORDINATES, COORDINATES, int."""
        runs = self.runs[self.runs["kind"] == kind]
        return runs["stands"], runs["belongs"], runs["words"]


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
) -> PoolComparison:
    """Compare `storage` with `shadow`, both uint8 [byte] of one rank.

    `held` is layer -> block ids (slots of a state) that belong to the layer's group now, in the order of the block table. `due` is the same
    for the blocks in which something was to arrive; in other blocks each difference is collateral. Default: all that are held. `ignore` is
    a mask of bytes that are left out, bool [byte]. `others` are regions of another rank or engine whose layers may turn up here (a draft
    layer only P has). `engine`, 0 P or 1 D, is whose pool it is: poison of the other one was copied. `most` bounds the runs that are kept.
    ValueError if the sizes do not fit.
    """
    if (
        storage.shape != shadow.shape
        or storage.ndim != 1
        or storage.dtype != np.uint8
        or shadow.dtype != np.uint8
    ):
        raise ValueError(
            f"storage {storage.shape} {storage.dtype} and shadow {shadow.shape} {shadow.dtype} are not the same bytes"
        )
    held_ids = {layer: _ids(blocks) for layer, blocks in held.items()}
    due_ids = held_ids if due is None else {layer: _ids(blocks) for layer, blocks in due.items()}
    for layer in (held_ids.keys() | due_ids.keys()) - {region.layer for region in regions}:
        raise ValueError(f"{layer} holds blocks and has no region")
    none = np.zeros(0, dtype=np.int64)
    finding = _Finding(tuple(regions), due_ids, most)
    compared_blocks = {
        id(blocks): len(np.unique(blocks)) for blocks in due_ids.values()
    }  # layers share their arrays
    compared = sum(
        math.prod(region.shape[1:]) * compared_blocks[id(due_ids[region.layer])]
        for region in regions
        if region.layer in due_ids
    )
    mask = _differences(storage, shadow)
    if mask is not None:
        if ignore is not None:
            mask &= ~ignore
        known = known_rows([*regions, *others])
        owned = _union(held_ids.values())
        for rest in (False, True):  # first the blocks that somebody holds, then those that nobody does
            for index, region in enumerate(regions):
                mine = held_ids.get(region.layer, none)
                blocks = np.setdiff1d(np.arange(region.shape[0]), owned) if rest else np.unique(mine)
                _look_at(finding, index, blocks, mask, (storage, shadow), known, rest)
        _look_at_raw(finding, mask, storage)
    pictured = sum(
        (region.shape[3] if region.kind == "attention" else 1)
        for region in regions
        if len(held_ids.get(region.layer, none))
    )
    return finding.result(compared, held_ids, pictured, engine)


def _ids(blocks: Iterable[int]) -> Array:
    return np.asarray(blocks if isinstance(blocks, np.ndarray) else list(blocks), dtype=np.int64).reshape(-1)


def _union(many: Iterable[Iterable[int]]) -> Array:
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(_ids(blocks) for blocks in many)]))


def _differences(storage: Array, shadow: Array) -> Array | None:
    """bool [byte], or None if all is equal: the common case costs one pass and no memory."""
    starts = range(0, len(storage), _STRETCH)
    one, other, size = storage.ctypes.data, shadow.ctypes.data, len(storage)
    if not (storage.flags.c_contiguous and shadow.flags.c_contiguous):
        raise ValueError("storage and shadow must be contiguous")
    wrong = [at for at in starts if _libc.memcmp(one + at, other + at, min(_STRETCH, size - at))]
    if not wrong:
        return None
    mask = np.zeros(len(storage), dtype=bool)  # pages without a difference are never touched
    for at in wrong:
        np.not_equal(storage[at : at + _STRETCH], shadow[at : at + _STRETCH], out=mask[at : at + _STRETCH])
    return mask


class _Finding:
    """What compare_pool has found so far."""

    def __init__(self, regions: tuple[Region, ...], due: dict[str, Array], most: int) -> None:
        self.regions, self.due, self.most = regions, due, most
        self.words, self.rows = (
            np.zeros(COLLATERAL + 1, dtype=np.int64),
            np.zeros(COLLATERAL + 1, dtype=np.int64),
        )
        self.runs: list[Array] = []
        self.raw = np.zeros(0, dtype=RAW)
        self.worst: dict[tuple[int, int], dict[int, int]] = {}
        self.truncated = False

    def add(
        self, index: int, at: tuple[Array, ...], kinds: Array, holds: Array, place: Array, words: int = 1
    ) -> Array:
        """Count rows. Each element of `kinds`, `holds` and `place`, all [row, lane], stands for so many `words`. Returns their runs."""
        self.words += words * np.bincount(kinds.ravel(), minlength=COLLATERAL + 1)
        rows = kinds.max(axis=-1)
        self.rows += np.bincount(rows, minlength=COLLATERAL + 1)
        for plane in np.unique(at[3]).tolist():
            here = at[3] == plane
            blocks, inverse = np.unique(at[0][here], return_inverse=True)
            worst = np.zeros(len(blocks), dtype=np.int64)
            np.maximum.at(worst, inverse, rows[here].astype(np.int64))
            known = self.worst.setdefault((index, plane), {})
            known.update(
                {
                    b: max(kind, known.get(b, SAME))
                    for b, kind in zip(blocks.tolist(), worst.tolist(), strict=True)
                }
            )
        runs = runs_of(index, self.regions[index], at, kinds, holds, place)
        runs["words"] *= words
        return runs

    def thin(self, slack: int = 4) -> None:
        """Keep whole blocks, evenly chosen, of no more than `most` runs, and of each kind one block at least.

        Nothing is done up to `slack` times as many: looking through all of them after every block would take longer than finding them.
        """
        if sum(len(runs) for runs in self.runs) <= slack * self.most:
            return
        runs = np.concatenate(self.runs)
        _, blocks = np.unique(runs["region"].astype(np.int64) << 32 | runs["block"], return_inverse=True)
        count = int(blocks.max()) + 1
        kept = max(1, count * self.most // len(runs))
        rare = [blocks[np.argmax(runs["kind"] == kind)] for kind in np.unique(runs["kind"])]
        self.runs = [runs[np.isin(blocks, np.append(np.linspace(0, count - 1, kept).astype(np.int64), rare))]]
        self.truncated = True

    def result(
        self, compared: int, held: dict[str, Array], pictured: int, engine: int | None
    ) -> PoolComparison:
        self.thin(slack=1)
        cells = []
        for (index, plane), worst in sorted(self.worst.items()):
            if any(kind > SAME for kind in worst.values()):
                order = list(
                    dict.fromkeys(
                        [*held.get(self.regions[index].layer, np.zeros(0)).tolist(), *sorted(worst)]
                    )
                )
                cells.append(
                    Cells(
                        index,
                        plane,
                        np.array(order),
                        np.array([worst.get(b, SAME) for b in order], dtype=np.uint8),
                    )
                )
        as_tuples = {id(blocks): tuple(blocks.tolist()) for blocks in self.due.values()}
        words, rows = (
            {kind: int(n[kind]) for kind in KINDS if kind != SAME and n[kind]}
            for n in (self.words, self.rows)
        )
        return PoolComparison(
            self.regions,
            words,
            rows,
            compared,
            np.concatenate([np.zeros(0, dtype=RUN), *self.runs]),
            self.raw,
            tuple(cells),
            pictured,
            {layer: as_tuples[id(blocks)] for layer, blocks in self.due.items()},
            engine,
            self.truncated,
        )


def _look_at(
    finding: _Finding,
    index: int,
    blocks: Array,
    mask: Array,
    both: tuple[Array, Array],
    known: Array,
    rest: bool,
) -> None:
    """Classify the rows of `blocks` that differ and take them off the mask. `rest`: nobody holds them; only what decodes is taken."""
    region = finding.regions[index]
    differs = region.of(mask)
    touched = np.array([b for b in blocks.tolist() if differs[b].any()], dtype=np.int64)
    got, want = (region.of(of) for of in both)
    aligned = not (region.offset % 8 or any(stride % 8 for stride in region.strides[:-1]))
    due = np.isin(touched, finding.due.get(region.layer, [])) & (not rest)
    step = max(1, _AT_ONCE // max(1, region.lanes * int(np.prod(region.shape[1:-1]))))
    for start in range(0, len(touched), step):
        some = touched[start : start + step]
        grid = np.broadcast_arrays(*_grid(region, some))
        at = tuple(axis.ravel() for axis in grid)
        ours, theirs = (of[some].reshape(-1, region.width) for of in (got, want))
        wanted = due[start : start + step].repeat(len(at[0]) // len(some))
        wrong = differs[some].reshape(-1, region.width)
        changed = np.asarray((wrong if region.width % 8 else wrong.view(np.uint64)).any(axis=-1))
        taken = np.ones(len(ours), dtype=bool)
        pieces = np.zeros(len(ours), dtype=bool)
        if aligned and region.lanes > 1 and not region.width % 8:
            pieces = in_one_piece(ours, known)
            pieces[pieces] = in_one_piece(theirs[pieces], known)
        runs = []
        for rows, bytes_ in (
            (pieces, 8),
            (~pieces, region.width),
        ):  # of a row in one piece the first word says all
            if not rows.any():
                continue
            kinds, holds, place = classify_rows(
                ours[rows, :bytes_], theirs[rows, :bytes_], aligned, known, wanted[rows]
            )
            kinds[~changed[rows]] = SAME  # ignored, or taken by another region already
            there = tuple(axis[rows] for axis in at)
            if rest:
                mine = ((kinds != SAME) & (holds["kind"] != FOREIGN)).any(axis=-1)
                taken[rows] = mine | (kinds == SAME).all(axis=-1)
                there, kinds, holds, place = (
                    tuple(axis[mine] for axis in there),
                    kinds[mine],
                    holds[mine],
                    place[mine],
                )
            if len(kinds):
                runs.append(
                    finding.add(
                        index, there, kinds, holds, place, region.width // bytes_ if bytes_ == 8 else 1
                    )
                )
        if runs:
            joined = np.concatenate(runs)
            finding.runs.append(
                joined[np.argsort(joined, order=("block", "slot", "row", "plane", "lane"))]
                if len(runs) > 1
                else joined
            )
        wrong[taken] = False
        differs[some] = wrong.reshape(len(some), *region.shape[1:])
        finding.thin()


def _grid(region: Region, blocks: Array) -> list[Array]:
    """Block, slot, row and plane of each row of some blocks, as arrays that broadcast."""
    if region.kind == "attention":
        _, slots, heads, planes, _ = region.shape
        axes = np.ix_(blocks, np.arange(slots), np.arange(heads), np.arange(planes))
    else:
        axes = np.ix_(
            blocks, np.zeros(1, dtype=np.int64), np.arange(region.shape[1]), np.array([region.segment])
        )
    return list(axes)


def _look_at_raw(finding: _Finding, mask: Array, storage: Array) -> None:
    """What is left on the mask: in no row that somebody holds."""
    padded = np.append(mask, np.zeros(-len(mask) % 8, dtype=bool)) if len(mask) % 8 else mask
    words = np.flatnonzero(padded.view(np.uint64))
    finding.words[COLLATERAL] += len(words)
    finding.rows[COLLATERAL] += len(words)
    finding.truncated |= len(words) > finding.most
    words = words[: finding.most]  # the pages of millions are not worth the time
    raw = np.zeros(len(words), dtype=RAW)
    raw["offset"] = 8 * words
    places = raw["offset"] + padded.reshape(-1, 8)[words].argmax(axis=1)
    page = np.full(
        (3, len(places)), -1, dtype=np.int64
    )  # region, block and distance: the page that begins last before the byte
    for index, region in enumerate(finding.regions):
        block, within = np.divmod(places - region.offset, region.strides[0])
        nearer = (block >= 0) & (block < region.shape[0]) & ((within < page[2]) | (page[2] < 0))
        page[:, nearer] = np.broadcast_to(index, within.shape)[nearer], block[nearer], within[nearer]
    raw["region"], raw["block"], raw["within"] = page
    found = np.zeros((len(raw), 8), dtype=np.uint8)
    for byte in range(8):
        here = raw["offset"] + byte < len(storage)
        found[here, byte] = storage[raw["offset"][here] + byte]
    raw["holds"] = decode(found.view(np.uint64)[:, 0])
    finding.raw = raw
