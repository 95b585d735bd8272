"""The plan: two sets of boxes become runs of bytes, from the memory of ranks of P to that of a rank of D.

A hand-over is the intersection of P's boxes and D's boxes (boxes.py) in absolute coordinates. It is found in
two steps.

`pair`, once per peer: for every box of D, the boxes of P with the same layer and part whose ranges cover it.
What several ranks hold (MLA, replicated heads) is read from one of them. A layer that only P has (a draft
model) is left alone. Layers of one shape that are evenly spaced on both sides become one more axis, "layer",
so that whatever follows is done once for all of them.

`runs`, once per request: the tokens are cut where a block ends on either side. Each cut is as wide as its
tokens; it is widened axis by axis as long as it is contiguous on both sides, and cuts that follow each other
on both sides become one. What is left are the longest runs that two layouts have in common, as arrays. No
loop goes over blocks or tokens, and layers are multiplied last.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from reference_connector.boxes import Box

Ints = NDArray[np.int64]
WORTH = 1 << 14  # bytes that are not needed are read as well if that saves a run for each so many of them
# Up to so many runs of a rank are compared with each other, in 2 ms at most. Of more runs only those of one
# strip are neighbours, as a rule.
EXACT = 1 << 15
Step = tuple[int, int, int]  # an axis of an intersection: how many, bytes from one to the next on D and on P


class Unplannable(Exception):
    """P's KV cannot be read into D's memory. The message is one sentence: what D needs, and what P has."""


@dataclass(frozen=True)
class Table:
    """The blocks of one request in one group of one engine.

    blocks[i] holds the tokens from first + i * (tokens per block) on. Tokens are counted from the start of
    the request. A part of a block table is fine; `first` is where it starts. Block 0 is vLLM's null block,
    which keeps nothing. Of a state: one block, the slot, which keeps "token 0".
    """

    blocks: Sequence[int] | Ints
    first: int = 0


@dataclass(frozen=True)
class Runs:
    """Run i: length[i] bytes from address remote[i] on P to address local[i] on D. int64 [n], any order."""

    local: Ints
    remote: Ints
    length: Ints

    @property
    def nbytes(self) -> int:
        return int(self.length.sum())


@dataclass(frozen=True)
class Match:
    """The intersection of boxes of D with boxes of one rank of P: one box with two addresses."""

    rank: int  # of P
    mine: Box  # how D cuts tokens into blocks: that of one of the layers
    theirs: Box
    local: int  # address on D of the first cell of token 0 of block 0
    remote: int
    axes: tuple[Step, ...]  # as far as they are not part of `width`
    width: int  # bytes that are contiguous on both sides, of one token (one unit)


@dataclass(frozen=True)
class Pairing:
    """How one rank of D reads from one P engine."""

    ranks: tuple[int, ...]  # of P: those that this rank of D reads from, as few as possible, ascending
    matches: tuple[Match, ...]


def pair(local: Sequence[Box], remote: Sequence[Sequence[Box]], rank: int = 0, size: int = 1) -> Pairing:
    """Pair this rank's boxes with those of P.

    `local`: boxes of rank `rank` of D's `size` tensor parallel ranks; `remote[r]`: boxes of P's tensor
    parallel rank r, all of them. `rank` and `size` only spread the reading of replicated KV over P's ranks.
    Raises Unplannable if P lacks a layer of D's, or if the two disagree on elements, axes or sizes.
    """
    theirs: dict[tuple[str, str], dict[int, Box]] = defaultdict(dict)
    for number, boxes in enumerate(remote):
        for box in boxes:
            theirs[box.layer, box.part][number] = box
    # Ranks that hold the same are neighbours, so the nearest one of each makes the smallest set.
    nearest = rank * len(remote) // size
    found = []
    for mine in _comparable(local, theirs):
        for source in _sources(mine, theirs[mine.layer, mine.part]):
            number = min(source, key=lambda number: abs(number - nearest))
            found.append(_match(mine, source[number], number))
    return Pairing(tuple(sorted({match.rank for match in found})), tuple(_stack(found)))


def runs(
    pairing: Pairing, spans: Sequence[tuple[int, int]], local: Sequence[Table], remote: Sequence[Table]
) -> dict[int, Runs]:
    """What to read for one request: rank of P -> runs, for every rank of `pairing.ranks`.

    spans[g]: absolute (start, stop) of the tokens that D needs in its group g, any numbers. `start` is where
    a prefix hit ends, or where a sliding window begins; `stop` is the number of tokens to load. (0, 1) asks
    for a state, (0, 0) for nothing.
    local[g]: D's table of its group g; remote[h]: P's table of P's group h. Both are indexed like
    `transfer_groups`. The names of the layers tell which group of P belongs to which of D. Tables may reach
    beyond the span; tables of empty spans are not used.

    More than the span is read into the same blocks of D. In the first block: what comes before the span and
    is in P's table, since vLLM may put that block into the prefix cache. In the last block: what saves runs.
    A tile (boxes.py) is not cut.
    Raises Unplannable if a table does not cover its span, has the null block in it, or names a block that the
    pool does not have.
    """
    found: dict[int, list[_Strip]] = {number: [] for number in pairing.ranks}
    for match in pairing.matches:
        start, stop = spans[match.mine.group]
        if start < stop:
            if match.theirs.group >= len(remote):
                needed = f"D needs that of group {match.theirs.group}"
                raise Unplannable(f"P handed over tables of {len(remote)} groups, and {needed}.")
            found[match.rank] += _strips(
                match, start, stop, local[match.mine.group], remote[match.theirs.group]
            )
    return {number: _write(strips) for number, strips in found.items()}


# ---- pair


def _comparable(local: Sequence[Box], theirs: dict[tuple[str, str], dict[int, Box]]) -> list[Box]:
    """D's boxes, each byte once: the tile if P has such tiles or D has no parts, otherwise the parts."""
    finer = {box.layer for box in local if box.part == "k"}
    tiled = set()
    for box in local:
        alike = any(other.unit == box.unit for other in theirs[box.layer, box.part].values())
        if box.part == "tile" and (alike or box.layer not in finer):
            tiled.add(box.layer)
    return [box for box in local if (box.part == "tile") == (box.layer in tiled)]


def _sources(mine: Box, theirs: dict[int, Box]) -> list[dict[int, Box]]:
    """Boxes of P that together cover `mine`, each cell once; each as the ranks that hold it, rank -> box."""
    if not theirs:
        raise Unplannable(f"P has no {mine.part} of layer {mine.layer}, which D has.")
    found: dict[tuple[tuple[int, int], ...], dict[int, Box]] = defaultdict(dict)
    for number, box in theirs.items():
        for what, ours, other in (
            ("elements", mine.element, box.element),
            ("bytes a cell", mine.width, box.width),
            ("tokens a cell", mine.unit, box.unit),
            ("cells that are cut by a block's end", 0, box.tokens % box.unit),
            ("axes", *([(axis.name, axis.whole) for axis in side.axes] for side in (mine, box))),
        ):
            if ours != other:
                which = f"{mine.part} of layer {mine.layer}"
                raise Unplannable(f"{which}: D has {what} {ours}, and rank {number} of P has {other}.")
        ranges = tuple(
            (max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(mine.axes, box.axes, strict=True)
        )
        if all(start < stop for start, stop in ranges):
            found[ranges][number] = box
    covered = sum(math.prod(stop - start for start, stop in ranges) for ranges in found)
    if covered != math.prod(axis.stop - axis.start for axis in mine.axes):
        has = sorted({_ranges(box) for box in theirs.values()})
        which = f"{mine.part} of layer {mine.layer}"
        raise Unplannable(f"{which}: D needs {_ranges(mine)}, and P's ranks have {' or '.join(has)}.")
    return list(found.values())


def _ranges(box: Box) -> str:
    return " x ".join(f"{axis.name} {axis.start} to {axis.stop}" for axis in box.axes)


def _match(mine: Box, theirs: Box, number: int) -> Match:
    local, remote, axes = mine.address, theirs.address, []
    for a, b in zip(mine.axes, theirs.axes, strict=True):
        start = max(a.start, b.start)
        local += (start - a.start) * a.stride
        remote += (start - b.start) * b.stride
        axes.append((min(a.stop, b.stop) - start, a.stride, b.stride))
    width, left = _fold(axes, mine.width)
    return Match(number, mine, theirs, local, remote, left, width)


def _fold(axes: Iterable[Step], width: int) -> tuple[int, tuple[Step, ...]]:
    """Widen `width` bytes by every axis that is contiguous on both sides: (bytes, axes that are left)."""
    left = []
    for many, local, remote in sorted(axes, key=lambda axis: axis[1]):
        if local == remote == width:
            width *= many
        elif many > 1:
            left.append((many, local, remote))
    return width, tuple(left)


def _stack(matches: Iterable[Match]) -> Iterator[Match]:
    """Join matches of one shape, evenly spaced on both sides, into one match with one more axis."""
    alike: dict[tuple[object, ...], list[Match]] = defaultdict(list)
    for match in matches:
        cut = [
            (b.group, b.num_blocks, b.block_stride, b.pieces, b.tokens, b.unit, b.token_stride)
            for b in (match.mine, match.theirs)
        ]
        alike[match.rank, *cut, match.axes, match.width].append(match)
    for some in alike.values():
        some.sort(key=lambda match: match.local)
        steps = [(b.local - a.local, b.remote - a.remote) for a, b in itertools.pairwise(some)]
        first = 0
        while first < len(some):
            last = first
            while last < len(steps) and steps[last] == steps[first]:
                last += 1
            layers = [(last - first + 1, *steps[first])] if last > first else []
            yield replace(some[first], axes=(*some[first].axes, *layers))
            first = last + 1


# ---- runs


@dataclass(frozen=True)
class _Strip:
    """Runs that repeat along axes."""

    local: Ints
    remote: Ints
    length: Ints
    axes: tuple[Step, ...]
    end: int = 0  # address where the run ends that has the last token
    over: int = 0  # bytes before that end that are not needed

    def offsets(self, side: int) -> Ints:
        """[repetition] bytes; side 1 is D, 2 is P."""
        made = np.zeros(1, np.int64)
        for axis in self.axes:
            made = np.add.outer(np.arange(axis[0], dtype=np.int64) * axis[side], made).ravel()
        return made


def _strips(match: Match, start: int, stop: int, mine: Table, theirs: Table) -> Iterator[_Strip]:
    """The runs of one match. From here on tokens are counted in units."""
    unit, width = match.mine.unit, match.width
    start, stop = start // unit, -(-stop // unit)
    before = (start - mine.first // unit) % (match.mine.tokens * match.mine.pieces // unit)
    start = min(start, max(start - before, theirs.first // unit))
    cuts, others = _ends(match.mine, mine, start, stop), _ends(match.theirs, theirs, start, stop)
    end = min(cuts[-1], others[-1])
    cuts = cuts[1:-1] if np.array_equal(cuts, others) else np.union1d(cuts[1:-1], others[1:-1])
    cuts = np.concatenate([[start], cuts, [stop]])
    adjoin = (match.mine.token_stride, match.theirs.token_stride) == (width, width)
    whole, exact = (
        math.prod(axis[0] for axis in _fold(match.axes, (at - cuts[-2]) * width)[1]) for at in (end, stop)
    )
    if adjoin and (end - stop) * width * math.prod(axis[0] for axis in match.axes) <= WORTH * (exact - whole):
        cuts[-1] = end
    counts = cuts[1:] - cuts[:-1]
    local = match.local + _places("D", match.mine, mine, cuts)
    remote = match.remote + _places("P", match.theirs, theirs, cuts)
    if not adjoin and (counts > 1).any():  # tokens are not contiguous on both sides: each token is a run
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        local = np.repeat(local, counts) + within * match.mine.token_stride
        remote = np.repeat(remote, counts) + within * match.theirs.token_stride
        yield _Strip(local, remote, np.full(len(local), width), match.axes)
        return
    kinds: dict[tuple[Step, ...], list[tuple[int, int]]] = defaultdict(list)
    for count in set(counts.tolist()):  # whole blocks, and parts of blocks
        wide, left = _fold(match.axes, count * width)
        kinds[left].append((count, wide // count))
    for left, sizes in kinds.items():
        some = np.isin(counts, [count for count, _ in sizes]) if len(kinds) > 1 else slice(None)
        lengths = counts * sizes[0][1]
        yield _Strip(
            *_join(local[some], remote[some], lengths[some]),
            left,
            local[-1] + lengths[-1],
            (cuts[-1] - stop) * width,
        )


def _ends(box: Box, table: Table, start: int, stop: int) -> Ints:
    """The first tokens of the kernel blocks with tokens `start` to `stop`, and the end of the last one."""
    size = box.tokens // box.unit
    return np.arange(start - (start - table.first // box.unit) % size, stop + size, size, dtype=np.int64)


def _places(side: str, box: Box, table: Table, cuts: Ints) -> Ints:
    """Bytes from token 0 of block 0 to the start of each cut. `cuts`: ascending, and the end of the last."""
    size, blocks = box.tokens // box.unit, np.asarray(table.blocks, dtype=np.int64)
    entry, within = np.divmod(cuts[:-1] - table.first // box.unit, size * box.pieces)
    if table.first % box.unit or entry[0] < 0 or entry[-1] >= len(blocks):
        covers = f"{table.first} to {table.first + len(blocks) * box.tokens * box.pieces}"
        wanted = f"{cuts[0] * box.unit} to {cuts[-1] * box.unit}"
        raise Unplannable(
            f"Group {box.group} of {side}: the table has tokens {covers}, and D needs {wanted}."
        )
    ids, last = blocks[entry], box.num_blocks // box.pieces - 1
    if ids.min() < 1 or ids.max() > last:
        wanted = f"{ids.min()} to {ids.max()}"
        raise Unplannable(
            f"Group {box.group} of {side}: the table has blocks {wanted}, and the pool has 1 to {last}."
        )
    piece, within = np.divmod(within, size)
    return (ids * box.pieces + piece) * box.block_stride + within * box.token_stride


def _join(local: Ints, remote: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
    """Join runs that follow each other on both sides."""
    if (local[1:] < local[:-1]).any():  # vLLM frees the last block first, so neighbours often descend
        order = np.argsort(local)
        local, remote, length = local[order], remote[order], length[order]
    follows = (local[1:] == local[:-1] + length[:-1]) & (remote[1:] == remote[:-1] + length[:-1])
    if not follows.any():
        return local, remote, length
    firsts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return local[firsts], remote[firsts], np.add.reduceat(length, firsts)


def _write(strips: list[_Strip]) -> Runs:
    """Repeat every strip along its axes."""
    total = sum(len(strip.length) * math.prod(axis[0] for axis in strip.axes) for strip in strips)
    local, remote, length = np.empty((3, total), np.int64)
    at = 0
    for strip in strips:
        here, there = strip.offsets(1), strip.offsets(2)
        end, shape = at + len(here) * len(strip.length), (len(here), len(strip.length))
        np.add.outer(here, strip.local, out=local[at:end].reshape(shape))
        np.add.outer(there, strip.remote, out=remote[at:end].reshape(shape))
        length[at:end].reshape(shape)[:] = strip.length
        at = end
    runs = Runs(*(_join(local, remote, length) if total <= EXACT else (local, remote, length)))
    for strip in [strip for strip in strips if strip.over and total <= EXACT]:
        # The bytes that are not needed are cut off, except where the run goes on after them.
        those = runs.local.searchsorted(ends := strip.end + strip.offsets(1)) - 1  # they ascend
        runs.length[those[runs.local[those] + runs.length[those] == ends]] -= strip.over
    return runs
