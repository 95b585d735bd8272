"""Layout mistakes that have names. Each predicts the addresses in a block if the mistake was made.

A name is given only if the prediction is true for every word of all blocks that differ. That includes the
words that the mistake leaves in the right place, so a shuffle that looks like a mistake here and there gets
no name.

Within a block an attention layer has n tokens (slots), H heads and 2 planes. A mistake maps the (slot, head,
plane) of a place to those of the row that it would hold: the index of the place in the memory order of one
layout is read as an index in the order of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pytest_kvconform.kvspace.kinds import MOVED, SAME, UNWRITTEN, ZEROED
from pytest_kvconform.kvspace.pools.addresses import ATTENTION, STATE, Array
from pytest_kvconform.kvspace.pools.compare import PoolComparison
from pytest_kvconform.kvspace.pools.poison import same_place
from pytest_kvconform.kvspace.pools.regions import Region
from pytest_kvconform.kvspace.pools.sources import Source, place_in, region_in, sample, when_read

Place = tuple[Array, Array, Array]  # slot, head as the rank counts, plane


@dataclass(frozen=True)
class Mistake:
    """A name and what it does within a block: (slot, head, plane, n, H) -> (slot, head, plane)."""

    name: str
    planes: int  # planes that the layer must have
    within: Callable[[Array, Array, Array, int, int], Place]


def _packed_as_split(s: Array, h: Array, p: Array, n: int, heads: int) -> Place:
    index = p * n + s
    return index // 2, h, index % 2


def _packed_as_split_all_heads(s: Array, h: Array, p: Array, n: int, heads: int) -> Place:
    index = (p * n + s) * heads + h
    return index // (2 * heads), index // 2 % heads, index % 2


def _split_as_packed(s: Array, h: Array, p: Array, n: int, heads: int) -> Place:
    index = 2 * s + p
    return index % n, h, index // n


def _split_as_packed_all_heads(s: Array, h: Array, p: Array, n: int, heads: int) -> Place:
    index = (s * heads + h) * 2 + p
    return index // heads % n, index % heads, index // (n * heads)


def _nhd_in_hnd(s: Array, h: Array, p: Array, n: int, heads: int) -> Place:
    index = h * n + s
    return index // heads, index % heads, p


def _hnd_in_nhd(s: Array, h: Array, p: Array, n: int, heads: int) -> Place:
    index = s * heads + h
    return index % n, index // n, p


def _reversed(s: Array, h: Array, p: Array, n: int, heads: int) -> Place:
    return s, heads - 1 - h if heads > 2 else h, p  # two heads: diagnose.py calls this an exchange


PACKED_AS_SPLIT = "a packed K|V per token was read as split (K of all tokens, then V of all tokens)"
SPLIT_AS_PACKED = "split K and V (K of all tokens, then V of all tokens) were read as packed K|V per token"
CONV_CUT = "the convolution state was cut in one piece across its segments"
TOKEN_AXIS = (
    "heads were split along the token axis: "
    "one piece of each block was taken instead of some heads of each token"
)
ONE_GROUP = "the block ids of one group were used for the layers of another"
LOCAL_STRIDE = "the local block stride was used to find the remote blocks"
CATALOGUE = (
    Mistake("K and V are exchanged", 2, lambda s, h, p, n, heads: (s, h, 1 - p)),
    Mistake("the heads are in reverse order", 1, _reversed),
    Mistake(PACKED_AS_SPLIT, 2, _packed_as_split),
    Mistake(PACKED_AS_SPLIT, 2, _packed_as_split_all_heads),
    Mistake(SPLIT_AS_PACKED, 2, _split_as_packed),
    Mistake(SPLIT_AS_PACKED, 2, _split_as_packed_all_heads),
    Mistake("NHD bytes were put into an HND cache", 1, _nhd_in_hnd),
    Mistake("HND bytes were put into an NHD cache", 1, _hnd_in_nhd),
)
_RATIOS = (2, 4, 8, 16)  # between the heads (channels) of a rank of P and of a rank of D


def name_mistakes(comparison: PoolComparison, source: Source | None = None) -> tuple[str, ...]:
    """Names of the mistakes that explain every wrong word: several, if they have the same effect here."""
    runs = comparison.runs
    wrong = runs["kind"] != SAME
    explainable = np.isin(runs["kind"], (SAME, MOVED, UNWRITTEN, ZEROED)).all() and not len(comparison.raw)
    if not wrong.any() or not explainable:
        return ()
    moved = bool((runs["kind"] == MOVED).any())
    tests: list[tuple[str, Callable[[], bool]]] = [
        *((mistake.name, lambda m=mistake: _within(comparison, m.planes, m.within)) for mistake in CATALOGUE),
        (TOKEN_AXIS, lambda: _token_axis(comparison)),
        (CONV_CUT, lambda: _conv_cut(comparison)),
        (ONE_GROUP, lambda: bool(wrong.all()) and _one_group(comparison, runs)),
    ]
    if source is not None:
        tests.append((LOCAL_STRIDE, lambda: _local_stride(comparison, runs[wrong], source)))
    names = [name for name, test in tests if (moved or name == LOCAL_STRIDE) and test()]
    when = when_read(comparison, runs[wrong], source) if source is not None else ""
    return tuple(dict.fromkeys([*names, when] if when else names))


def _by_region(comparison: PoolComparison) -> Iterator[tuple[Region, Array]]:
    for index in np.unique(comparison.runs["region"]).tolist():
        yield comparison.regions[index], comparison.runs[comparison.runs["region"] == index]


def _fits(runs: Array, kind: int, token: Array, head: Array, plane: Array) -> bool:
    """Whether all runs hold the predicted address.

    That is: these coordinates, and the layer, lane, owner and engine that the place should hold. If the
    predicted token was not due, the place may also hold poison or zeros. Or it holds that token all the same:
    P computes the last token of a prompt, and D computes it again.
    """
    expected, found = runs["expected"], runs["found"]
    right = (
        (found["kind"] == kind)
        & (found["token"] == token)
        & (found["head"] == head)
        & (found["plane"] == plane)
    )
    for name in ("layer", "lane"):
        right &= found[name] == expected[name]
    not_due = (token > expected["token"].max()) | (token < expected["token"].min())
    due_who, found_who = (at["owner"].astype(np.int64) * 2 + at["engine"] for at in (expected, found))
    # Within a block the owner or the engine may change from one token to the next.
    due_token = (expected["token"].astype(np.int64) << 17) + due_who
    found_token = (found["token"].astype(np.int64) << 17) + found_who
    right &= (not_due & np.isin(found_who, due_who)) | np.isin(found_token, due_token)
    return bool((right | (not_due & np.isin(runs["kind"], (UNWRITTEN, ZEROED)))).all())


def _within(
    comparison: PoolComparison, planes: int, within: Callable[[Array, Array, Array, int, int], Place]
) -> bool:
    for region, runs in _by_region(comparison):
        if region.kind != "attention" or region.shape[3] < planes:
            return False
        s, h, p = (runs[name].astype(np.int64) for name in ("slot", "row", "plane"))
        slot, head, plane = within(s, h, p, region.block_size, region.shape[2])
        token = runs["expected"]["token"] - runs["slot"] + slot
        if not _fits(runs, ATTENTION, token, region.first + head, plane):
            return False
    return True


def _token_axis(comparison: PoolComparison) -> bool:
    """A rank of D took a contiguous part of each block of a rank with more heads, or joined several blocks.

    The block that was read has tokens as its outermost axis (NHD); the block that was written is NHD or HND.
    """

    def wider(ratio: int, region: Region, s: Array, h: Array, nhd: bool) -> tuple[Array, Array]:
        n, heads = region.block_size, region.shape[2]
        index = (s * heads + h if nhd else h * n + s) + region.first // heads % ratio * n * heads
        many = heads * ratio
        return index // many, region.first // many * many + index % many

    def narrower(ratio: int, region: Region, s: Array, h: Array, nhd: bool) -> tuple[Array, Array]:
        n, heads = region.block_size, region.shape[2]
        few = heads // ratio
        index = s * heads + h if nhd else h * n + s
        rank, index = index // (n * max(few, 1)), index % (n * max(few, 1))
        return index // max(few, 1), region.first + rank * few + index % max(few, 1)

    def explains(move: Callable[..., tuple[Array, Array]], ratio: int, nhd: bool) -> bool:
        for region, runs in _by_region(comparison):
            if region.kind != "attention" or (move is narrower and region.shape[2] % ratio):
                return False
            slot, head = move(ratio, region, runs["slot"].astype(np.int64), runs["row"].astype(np.int64), nhd)
            token = runs["expected"]["token"] - runs["slot"] + slot
            if not _fits(runs, ATTENTION, token, head, runs["plane"]):
                return False
        return True

    return any(
        explains(move, ratio, nhd) for move in (wider, narrower) for ratio in _RATIOS for nhd in (True, False)
    )


def _conv_cut(comparison: PoolComparison) -> bool:
    """Q, K and V of a convolution state must each be cut over the ranks; here they were cut as one piece."""

    def explains(ratio: int, wider: bool) -> bool:
        for region, runs in _by_region(comparison):
            parts = [r for r in comparison.regions if r.layer == region.layer and r.segment < 3]
            parts.sort(key=lambda part: part.segment)
            if region.kind != "state" or region.segment > 2 or len(parts) != 3:
                return False
            if not wider and any(part.shape[1] % ratio for part in parts):
                return False
            sizes = np.array([part.shape[1] for part in parts])
            index = runs["row"].astype(np.int64) + sizes[: region.segment].sum()
            if wider:  # cut out of a rank with `ratio` times the channels
                rank = region.first // region.shape[1] % ratio
                theirs, index = sizes * ratio, index + rank * sizes.sum()
                firsts = np.array([part.first for part in parts]) // theirs * theirs
            else:  # put together from `ratio` ranks
                theirs = sizes // ratio
                rank, index = np.divmod(index, theirs.sum())
                firsts = np.array([part.first for part in parts])
            segment = np.searchsorted(np.cumsum(theirs), index, side="right")
            channel = firsts[segment] + index - (np.cumsum(theirs) - theirs)[segment]
            if not wider:
                channel = channel + rank * theirs[segment]
            if not _fits(runs, STATE, runs["expected"]["token"], channel, segment):
                return False
        return True

    return any(explains(ratio, wider) for wider in (True, False) for ratio in _RATIOS)


def _one_group(comparison: PoolComparison, wrong: Array) -> bool:
    """Every wrong place holds the row from the same place of a layer that shares its memory.

    The layers whose rows are found share no memory with each other: they belong to one group.
    """
    attention = [region for region in comparison.regions if region.kind == "attention"]
    place = {region.number: (region.offset, region.strides) for region in attention}
    expected, found = wrong["expected"], wrong["found"]
    all_attention = (found["kind"] == ATTENTION).all() and (expected["kind"] == ATTENTION).all()
    if not (wrong["kind"] == MOVED).all() or not all_attention:
        return False
    layers = {(a, b) for a, b in zip(expected["layer"].tolist(), found["layer"].tolist(), strict=True)}
    sources = {b for _, b in layers}
    if any(a == b or b not in place or place[a] != place[b] for a, b in layers):
        return False
    if len({place[b] for b in sources}) < len(sources):
        return False
    sizes = np.array([region.block_size for region in comparison.regions])[wrong["region"]]
    same = (expected["token"] - found["token"]) % sizes == 0
    for name in ("head", "plane", "lane"):
        same &= expected[name] == found[name]
    return bool(same.all())


def _local_stride(comparison: PoolComparison, wrong: Array, source: Source) -> bool:
    """Block b of the source was looked for at b times the block stride of this pool.

    Both the right place and the place that was read are computed as offsets in the source's storage.
    """
    for run in sample(wrong):
        here, expected = comparison.regions[run["region"]], run["expected"]
        there = region_in(source, int(here.number))
        right, read = place_in(source, expected), place_in(source, run["found"])
        if there is None or here.strides[0] == there.strides[0] or right is None or read is None:
            return False
        block = source.tables[there.layer, int(expected["owner"])][expected["token"] // there.block_size]
        if not same_place(read - right, block * (here.strides[0] - there.strides[0])):
            return False
    return len(wrong) > 0
