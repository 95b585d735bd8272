"""Attribution: each byte that differs is assigned to a row of a region, or to the bytes outside of all rows.

Layers of different KV cache groups may lie in the same memory, and a block id belongs to one group at a time.
So a difference is assigned to the layer that holds the block now (`in_held_blocks`). In blocks that no layer
holds, a row is assigned to a layer if it holds an address (`in_unowned_blocks`). What is left, the padding of
pages for example, is listed word by word (`outside_of_rows`).
"""

from __future__ import annotations

import numpy as np

from pytest_kvconform.kvspace.kinds import COLLATERAL, SAME
from pytest_kvconform.kvspace.pools.addresses import COORDINATES, FOREIGN, Array
from pytest_kvconform.kvspace.pools.classify import classify_rows, in_one_piece, runs_of
from pytest_kvconform.kvspace.pools.regions import Region
from pytest_kvconform.kvspace.pools.words import decode

# A word, 8 bytes at a multiple of 8, outside of all rows: in the padding of a page, or in no
# page (then region and block are -1). `within` is bytes from the start of the region's page
# to the first byte that differs.
RAW = np.dtype(
    [("offset", "i8"), ("region", "i2"), ("block", "i4"), ("within", "i8"), ("found", COORDINATES)]
)
_AT_ONCE = 1 << 17  # words classified at a time


class Attribution:
    """The differences of one storage, and what has been found in them so far.

    `mask` is bool [byte]: True for bytes that differ and are not assigned yet. The methods clear it as they
    go.
    """

    def __init__(
        self,
        storage: Array,
        shadow: Array,
        mask: Array,
        regions: tuple[Region, ...],
        due: dict[str, Array],
        known: Array,
        most: int,
    ) -> None:
        """`due`: layer -> blocks that were due. `known`: see `known_rows`. `most`: runs to keep."""
        self.storage, self.shadow, self.mask = storage, shadow, mask
        self.regions, self.due, self.known, self.most = regions, due, known, most
        self.words = np.zeros(COLLATERAL + 1, dtype=np.int64)  # by kind
        self.rows = np.zeros(COLLATERAL + 1, dtype=np.int64)  # by kind of the worst word
        self.runs: list[Array] = []  # RUN, one array for some blocks
        self.raw = np.zeros(0, dtype=RAW)
        self.worst: dict[tuple[int, int], dict[int, int]] = {}  # (region, plane) -> block -> worst kind
        self.truncated = False

    def in_held_blocks(self, index: int, blocks: Array) -> None:
        """Classify the rows of region `index` that differ, in `blocks` that its layer holds."""
        self._assign(index, blocks, held=True)

    def in_unowned_blocks(self, index: int, blocks: Array) -> None:
        """The same in `blocks` that no layer holds. Rows without any address are left to other regions."""
        self._assign(index, blocks, held=False)

    def _assign(self, index: int, blocks: Array, held: bool) -> None:
        region = self.regions[index]
        differs = region.of(self.mask)
        touched = np.array([b for b in blocks.tolist() if differs[b].any()], dtype=np.int64)
        got, want = region.of(self.storage), region.of(self.shadow)
        aligned = not (region.offset % 8 or any(stride % 8 for stride in region.strides[:-1]))
        due = np.isin(touched, self.due.get(region.layer, [])) & held
        step = max(1, _AT_ONCE // max(1, region.lanes * int(np.prod(region.shape[1:-1]))))
        for start in range(0, len(touched), step):
            some = touched[start : start + step]
            at = _places(region, some)
            ours, theirs = (of[some].reshape(-1, region.width) for of in (got, want))
            wanted = due[start : start + step].repeat(len(at[0]) // len(some))
            wrong = differs[some].reshape(-1, region.width)
            changed = np.asarray((wrong if region.width % 8 else wrong.view(np.uint64)).any(axis=-1))
            taken = np.ones(len(ours), dtype=bool)
            pieces = np.zeros(len(ours), dtype=bool)
            if aligned and region.lanes > 1 and not region.width % 8:
                pieces = in_one_piece(ours, self.known)
                pieces[pieces] = in_one_piece(theirs[pieces], self.known)
            runs = []
            # Of a row in one piece the first word, 8 bytes, tells the rest.
            for rows, size, each in ((pieces, 8, region.width // 8), (~pieces, region.width, 1)):
                if not rows.any():
                    continue
                kinds, found, expected = classify_rows(
                    ours[rows, :size], theirs[rows, :size], aligned, self.known, wanted[rows]
                )
                kinds[~changed[rows]] = SAME  # ignored by the caller, or assigned to another region already
                there = tuple(axis[rows] for axis in at)
                if not held:
                    mine = ((kinds != SAME) & (found["kind"] != FOREIGN)).any(axis=-1)
                    taken[rows] = mine | (kinds == SAME).all(axis=-1)
                    there = tuple(axis[mine] for axis in there)
                    kinds, found, expected = kinds[mine], found[mine], expected[mine]
                if len(kinds):
                    runs.append(self._add(index, there, kinds, found, expected, each))
            if runs:
                joined = np.concatenate(runs)
                order = ("block", "slot", "row", "plane", "lane")
                self.runs.append(joined[np.argsort(joined, order=order)] if len(runs) > 1 else joined)
            wrong[taken] = False
            differs[some] = wrong.reshape(len(some), *region.shape[1:])
            self.bound_runs()

    def _add(
        self, index: int, at: tuple[Array, ...], kinds: Array, found: Array, expected: Array, words: int
    ) -> Array:
        """Count rows and return their runs. Each element of the arrays [row, lane] is so many `words`."""
        self.words += words * np.bincount(kinds.ravel(), minlength=COLLATERAL + 1)
        rows = kinds.max(axis=-1)
        self.rows += np.bincount(rows, minlength=COLLATERAL + 1)
        for plane in np.unique(at[3]).tolist():
            here = at[3] == plane
            blocks, inverse = np.unique(at[0][here], return_inverse=True)
            worst = np.zeros(len(blocks), dtype=np.int64)
            np.maximum.at(worst, inverse, rows[here].astype(np.int64))
            known = self.worst.setdefault((index, plane), {})
            for block, kind in zip(blocks.tolist(), worst.tolist(), strict=True):
                known[block] = max(kind, known.get(block, SAME))
        runs = runs_of(index, self.regions[index], at, kinds, found, expected)
        runs["words"] *= words
        return runs

    def bound_runs(self, slack: int = 4) -> None:
        """Keep whole blocks, evenly chosen, of no more than `most` runs, and of each kind one block at least.

        Up to `slack` times as many are kept as they are: to look through all of them after every block would
        take longer than to find them.
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

    def outside_of_rows(self) -> None:
        """List the words that are still on the mask."""
        mask, storage = self.mask, self.storage
        padded = np.append(mask, np.zeros(-len(mask) % 8, dtype=bool)) if len(mask) % 8 else mask
        words = np.flatnonzero(padded.view(np.uint64))
        self.words[COLLATERAL] += len(words)
        self.rows[COLLATERAL] += len(words)
        self.truncated |= len(words) > self.most
        words = words[: self.most]
        raw = np.zeros(len(words), dtype=RAW)
        raw["offset"] = 8 * words
        places = raw["offset"] + padded.reshape(-1, 8)[words].argmax(axis=1)
        # Region, block and distance of the page that begins last before the byte.
        page = np.full((3, len(places)), -1, dtype=np.int64)
        for index, region in enumerate(self.regions):
            block, within = np.divmod(places - region.offset, region.strides[0])
            nearer = (block >= 0) & (block < region.shape[0]) & ((within < page[2]) | (page[2] < 0))
            page[:, nearer] = np.broadcast_to(index, within.shape)[nearer], block[nearer], within[nearer]
        raw["region"], raw["block"], raw["within"] = page
        content = np.zeros((len(raw), 8), dtype=np.uint8)
        for byte in range(8):
            here = raw["offset"] + byte < len(storage)
            content[here, byte] = storage[raw["offset"][here] + byte]
        raw["found"] = decode(content.view(np.uint64)[:, 0])
        self.raw = raw


def _places(region: Region, blocks: Array) -> tuple[Array, ...]:
    """Block, slot, row and plane of each row of some blocks: four arrays [row]."""
    if region.kind == "attention":
        _, slots, heads, planes, _ = region.shape
        axes = np.ix_(blocks, np.arange(slots), np.arange(heads), np.arange(planes))
    else:
        slot, segment = np.zeros(1, dtype=np.int64), np.array([region.segment])
        axes = np.ix_(blocks, slot, np.arange(region.shape[1]), segment)
    return tuple(axis.ravel() for axis in np.broadcast_arrays(*axes))
