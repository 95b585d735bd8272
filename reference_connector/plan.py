"""The plan: two sets of boxes become runs of bytes, from the memory of ranks of P to that of a rank of D.

A hand-over is the intersection of P's boxes and D's boxes (boxes.py) in absolute coordinates.

`pair`, once per peer: for every box of D, the boxes of P with the same layer and part whose ranges cover it.
What several ranks hold (MLA, replicated heads) is read from one of them. A layer that only P has (a draft
model) is left alone. Layers of one shape that are evenly spaced on both sides become one more axis.

`runs`, once per request, takes five decisions for each pair of boxes:

    D's blocks of 4 tokens  |       |       |       |       |
    P's blocks of 6 tokens  |           |           |           |
    needed                      [---------------)                 tokens 2 to 10 here: what D lacks
    _begin                  [<--                                  from the start of D's block
    _cuts                   [-------|---|---|---)                 cut where a block ends on either side
    _end                                        )-->|             read on, where that makes fewer runs
    _between_tokens         [-|-|-|-|-|-|-|-|-|-)                 or cut here, if tokens do not lie together
    _widen                  a cut of all layers, heads, ... that lie together is one run

No loop goes over blocks or tokens. Runs that follow each other become one, and layers are multiplied last.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from reference_connector.boxes import Box

Ints = NDArray[np.int64]
WORTH = 1 << 14  # bytes that are not needed are read as well if that saves a run for each so many of them
EXACT = 1 << 15  # runs of a rank that are compared with each other: 2 ms. Of more, only those of one strip
Step = tuple[int, int, int]  # an axis of an intersection: how many, bytes from one to the next on D and on P


class Unplannable(Exception):
    """P's KV cannot be read into D's memory. The message is one sentence: what D needs, and what P has."""


class Table(msgspec.Struct, frozen=True):
    """The blocks of one request in one group of one engine, or a part of them.

    blocks[i] holds the tokens from first + i * (tokens per block) on. Block 0 is vLLM's null block, which
    keeps nothing. Of a state: one block, the slot, which keeps "token 0".
    """

    blocks: Sequence[int] = ()
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


_Strip = tuple[Runs, tuple[Step, ...]]  # runs that repeat along axes


@dataclass(frozen=True)
class Match:
    """The intersection of a box of D with one of P: a box with two addresses."""

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

    `local`: boxes of rank `rank` of D's `size` ranks; `remote[r]`: all boxes of P's rank r. `rank` and `size`
    only spread the reading of replicated KV over P's ranks. Raises Unplannable.
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

    spans[g]: (start, stop) of the tokens that D needs in its group g. (0, 1) asks for a state, (0, 0) for
    nothing. local[g]: D's table of its group g; remote[h]: P's table of P's group h. The names of the layers
    tell which group of P belongs to which of D. Raises Unplannable if a table does not cover its span, or
    names a block that keeps nothing there.
    """
    found: dict[int, list[_Strip]] = {number: [] for number in pairing.ranks}
    for match in pairing.matches:
        start, stop = spans[match.mine.group]
        if start < stop:
            if (group := match.theirs.group) >= len(remote):
                raise Unplannable(f"P handed over {len(remote)} tables, and D needs that of group {group}.")
            found[match.rank] += _strips(match, start, stop, local[match.mine.group], remote[group])
    return {number: _repeat(strips) for number, strips in found.items()}


# ---- pair


def _comparable(local: Sequence[Box], theirs: dict[tuple[str, str], dict[int, Box]]) -> list[Box]:
    """D's boxes, each byte once: the tile if P has such tiles or D has no parts, otherwise the parts."""
    in_parts = {box.layer for box in local if box.part == "k"}
    tiles = [box for box in local if box.part == "tile"]
    alike = {box.layer for box in tiles if box.unit in {b.unit for b in theirs[box.layer, "tile"].values()}}
    tiled = {box.layer for box in tiles} - (in_parts - alike)
    return [box for box in local if (box.part == "tile") == (box.layer in tiled)]


def _sources(mine: Box, theirs: dict[int, Box]) -> list[dict[int, Box]]:
    """Boxes of P that together cover `mine`, each cell once; each as the ranks that hold it, rank -> box."""
    which = f"{mine.part} of layer {mine.layer}"
    if not theirs:
        raise Unplannable(f"P has no {which}, which D has.")
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
                raise Unplannable(f"{which}: D has {what} {ours}, and rank {number} of P has {other}.")
        pairs = zip(mine.axes, box.axes, strict=True)
        ranges = tuple((max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
        if all(start < stop for start, stop in ranges):
            found[ranges][number] = box
    covered = sum(math.prod(stop - start for start, stop in ranges) for ranges in found)
    if covered != math.prod(axis.stop - axis.start for axis in mine.axes):
        needed, *has = (
            " x ".join(f"{axis.name} {axis.start} to {axis.stop}" for axis in box.axes)
            for box in (mine, *theirs.values())
        )
        ranks = " or ".join(sorted(set(has)))
        raise Unplannable(f"{which}: D needs {needed}, and P's ranks have {ranks}.")
    return list(found.values())


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

    def cut(box: Box) -> tuple[int, ...]:
        return box.group, box.num_blocks, box.block_stride, box.pieces, box.tokens, box.unit, box.token_stride

    alike: dict[tuple[object, ...], list[Match]] = defaultdict(list)
    for match in matches:
        alike[match.rank, cut(match.mine), cut(match.theirs), match.axes, match.width].append(match)
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


def _many(axes: Iterable[Step]) -> int:
    """How often what has these axes repeats."""
    return math.prod(axis[0] for axis in axes)


def _strips(match: Match, start: int, stop: int, mine: Table, theirs: Table) -> Iterator[_Strip]:
    """The runs of one match: five decisions, see the drawing above. From here on tokens are units."""
    unit, width = match.mine.unit, match.width
    start, stop = _begin(match, start // unit, mine, theirs), -(-stop // unit)
    if (match.mine.token_stride, match.theirs.token_stride) == (width, width):
        cuts, end = _cuts(match, start, stop, mine, theirs)
        cuts[-1] = _end(match, cuts, end)
    else:
        cuts = _between_tokens(start, stop)
    local = match.local + _places("D", match.mine, mine, cuts)
    remote = match.remote + _places("P", match.theirs, theirs, cuts)
    return _widen(match, local, remote, np.diff(cuts))


def _begin(match: Match, start: int, mine: Table, theirs: Table) -> int:
    """The start of D's block, as far as P has it: vLLM puts the whole block into D's prefix cache."""
    unit = match.mine.unit
    before = (start - mine.first // unit) % (match.mine.tokens * match.mine.pieces // unit)
    return min(start, max(start - before, theirs.first // unit))


def _cuts(match: Match, start: int, stop: int, mine: Table, theirs: Table) -> tuple[Ints, int]:
    """`start`, where a block ends on either side, `stop`; and where the first block ends at or after it."""
    ends, others = _ends(match.mine, mine, start, stop), _ends(match.theirs, theirs, start, stop)
    between = ends[1:-1] if np.array_equal(ends, others) else np.union1d(ends[1:-1], others[1:-1])
    return np.concatenate([[start], between, [stop]]), min(ends[-1], others[-1])


def _ends(box: Box, table: Table, start: int, stop: int) -> Ints:
    """The first tokens of the kernel blocks with tokens `start` to `stop`, and the end of the last one."""
    size = box.tokens // box.unit
    return np.arange(start - (start - table.first // box.unit) % size, stop + size, size, dtype=np.int64)


def _end(match: Match, cuts: Ints, end: int) -> int:
    """The end of the last block, if the rest of it joins what would be many runs. Otherwise the last cut."""
    *_, begin, stop = cuts
    whole, exact = (_many(_fold(match.axes, (at - begin) * match.width)[1]) for at in (end, stop))
    rest = (end - stop) * match.width * _many(match.axes)
    return end if rest <= WORTH * (exact - whole) else stop


def _between_tokens(start: int, stop: int) -> Ints:
    """Every token is a run: they are not contiguous on both sides."""
    return np.arange(start, stop + 1)


def _widen(match: Match, local: Ints, remote: Ints, counts: Ints) -> Iterator[_Strip]:
    """A run for each cut, as wide as so many tokens are contiguous on both sides: whole blocks are wider."""
    alike: dict[tuple[Step, ...], list[int]] = defaultdict(list)
    for count in set(counts.tolist()):
        alike[_fold(match.axes, count * match.width)[1]].append(count)
    for left, some in alike.items():
        those = np.isin(counts, some) if len(alike) > 1 else slice(None)
        lengths = counts * (match.width * _many(match.axes) // _many(left))
        yield Runs(*_join(local[those], remote[those], lengths[those])), left


def _places(side: str, box: Box, table: Table, cuts: Ints) -> Ints:
    """Bytes from token 0 of block 0 to the start of each cut."""
    size, blocks = box.tokens // box.unit, np.asarray(table.blocks, dtype=np.int64)
    entry, within = np.divmod(cuts[:-1] - table.first // box.unit, size * box.pieces)
    where = f"Group {box.group} of {side}: the table has"
    if table.first % box.unit or entry[0] < 0 or entry[-1] >= len(blocks):
        has = f"{table.first} to {table.first + len(blocks) * box.tokens * box.pieces}"
        needed = f"{cuts[0] * box.unit} to {cuts[-1] * box.unit}"
        raise Unplannable(f"{where} tokens {has}, and D needs {needed}.")
    ids, last = blocks[entry], box.num_blocks // box.pieces - 1
    if ids.min() < 1 or ids.max() > last:
        raise Unplannable(f"{where} blocks {ids.min()} to {ids.max()}, and the pool has 1 to {last}.")
    piece, within = np.divmod(within, size)
    return (ids * box.pieces + piece) * box.block_stride + within * box.token_stride


def _join(local: Ints, remote: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
    """Join runs that follow each other on both sides."""
    if (local[1:] < local[:-1]).any():  # vLLM frees the last block first, so neighbours often descend
        order = np.argsort(local)
        local, remote, length = local[order], remote[order], length[order]
    follows = (local[1:] == local[:-1] + length[:-1]) & (remote[1:] == remote[:-1] + length[:-1])
    firsts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return local[firsts], remote[firsts], np.add.reduceat(length, firsts)


def _repeat(strips: list[_Strip]) -> Runs:
    """Repeat the runs of every strip along its axes."""
    if len(strips) == 1 and not strips[0][1]:
        return strips[0][0]
    total = sum(len(runs.length) * _many(axes) for runs, axes in strips)
    local, remote, length = np.empty((3, total), np.int64)
    at = 0
    for runs, axes in strips:
        here, there = _offsets(axes, 1), _offsets(axes, 2)
        end, shape = at + len(here) * len(runs.length), (len(here), len(runs.length))
        np.add.outer(here, runs.local, out=local[at:end].reshape(shape))
        np.add.outer(there, runs.remote, out=remote[at:end].reshape(shape))
        length[at:end].reshape(shape)[:] = runs.length
        at = end
    return Runs(*(_join(local, remote, length) if 0 < total <= EXACT else (local, remote, length)))


def _offsets(axes: Iterable[Step], side: int) -> Ints:
    """Where what has these axes repeats: [repetition] bytes. Side 1 is D, 2 is P."""
    made = np.zeros(1, np.int64)
    for axis in axes:
        made = np.add.outer(np.arange(axis[0], dtype=np.int64) * axis[side], made).ravel()
    return made
