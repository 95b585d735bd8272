"""Sentences on words that did not move: never written, zero, garbled, collateral; and shared parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from pytest_kvconform.kvspace.kinds import COLLATERAL, GARBLED, SAME, SEGMENTS, UNWRITTEN, ZEROED, intervals
from pytest_kvconform.kvspace.pools.addresses import ATTENTION, POISON, STATE, Array
from pytest_kvconform.kvspace.pools.compare import PoolComparison
from pytest_kvconform.kvspace.pools.poison import same_place
from pytest_kvconform.kvspace.pools.regions import Region

ENGINES = ("the prefiller", "the decoder")
NO_ADDRESS = "bytes that are neither KV nor poison"


def words_of(count: int) -> str:
    """ "1 word", "320 words"."""
    return f"{count} word{'s' if count != 1 else ''}"


def share_of(comparison: PoolComparison, kind: int) -> str:
    """ "all 320 words" or "300 of 320 wrong words": the words of a kind among the wrong ones."""
    count = comparison.words[kind]
    return (
        f"all {words_of(count)}"
        if count == comparison.wrong
        else f"{count} of {comparison.wrong} wrong words"
    )


def _names(names: Sequence[str], drafts: Collection[str] = ()) -> str:
    """ "A", "A and B" or "A and 5 more layers"."""
    shown = [f"{name} (draft)" if name in drafts else name for name in names]
    return " and ".join(shown) if len(shown) < 3 else f"{shown[0]} and {len(shown) - 1} more layers"


def layers_of(comparison: PoolComparison, kind: int | None = None, drafts: Collection[str] = ()) -> str:
    """Layers with words of a kind, or with any wrong words. `runs` are bounded, so `cells` count as well."""
    runs = comparison.runs
    regions = set(runs["region"][runs["kind"] == kind if kind is not None else runs["kind"] != SAME].tolist())
    regions |= {cells.region for cells in comparison.cells if kind is None or (cells.kinds == kind).any()}
    return _names(list(dict.fromkeys(comparison.regions[index].layer for index in sorted(regions))), drafts)


def name_of(comparison: PoolComparison, number: int) -> str:
    """The name of the layer with this number."""
    return next(
        (region.layer for region in comparison.regions if region.number == number),
        f"layer {number} (not in this engine)",
    )


def _missing(
    comparison: PoolComparison, kind: int, drafts: Collection[str], never: str, one: str, many: str
) -> str:
    """Where the rows of a kind are: whole layers or segments, the first or the last block, or else tokens.

    `never` is the sentence on layers ("no byte of {} was written"); `one` is the verb for a token ("was never
    written"), `many` for several tokens.
    """
    parts = [
        (comparison.regions[i], comparison.runs[comparison.runs["region"] == i])
        for i in np.unique(comparison.runs["region"]).tolist()
    ]
    parts = [(region, runs) for region, runs in parts if (runs["kind"] == kind).any()]
    layers, names = {region.layer for region, _ in parts}, layers_of(comparison, kind, drafts)
    share = f"{share_of(comparison, kind)} in {names}"
    if all(_whole(comparison, region, runs, kind) for region, runs in parts):
        missing = {(region.layer, region.segment) for region, _ in parts}
        if all(
            (region.layer, region.segment) in missing
            for region in comparison.regions
            if region.layer in layers
        ):
            return never.format(names) + f" ({share_of(comparison, kind)})"
        segments = [SEGMENTS[segment] for segment in sorted({segment for _, segment in missing})]
        return never.format(f"{' and '.join(segments)} of {names}") + f" ({share_of(comparison, kind)})"
    places = {_block_place(comparison, region, runs, kind) for region, runs in parts}
    some = np.concatenate([runs[runs["kind"] == kind] for _, runs in parts])
    tokens = set(some["expected"]["token"].tolist())
    if len(places) == 1 and "" not in places:
        return f"{places.pop()} ({share})"
    which = f"token{'s' if len(tokens) > 1 else ''} {intervals(tokens)}"
    return f"{which} {many if len(tokens) > 1 else one} ({share})"


def _whole(comparison: PoolComparison, region: Region, runs: Array, kind: int) -> bool:
    """Whether all rows that were due in a region are of one kind."""
    return bool((runs["kind"] == kind).all()) and set(runs["block"].tolist()) >= set(
        comparison.due.get(region.layer, ())
    )


def _block_place(comparison: PoolComparison, region: Region, runs: Array, kind: int) -> str:
    """What happened to the first or the last block, if exactly its rows are of the kind; otherwise ""."""
    due, rows = comparison.due.get(region.layer, ()), runs[runs["kind"] == kind]
    blocks = set(rows["block"].tolist())
    if (
        region.kind != "attention"
        or len(blocks) != 1
        or len(due) < 2
        or (runs["kind"][np.isin(runs["block"], list(blocks))] != kind).any()
    ):
        return ""
    (block,) = blocks
    if block == due[0]:
        window = " of the window" if rows["expected"]["token"].min() >= region.block_size else ""
        return f"the first block{window} " + ("was never written" if kind == UNWRITTEN else "holds zeros")
    if block == due[-1]:
        partial = "(partial) " if (rows["expected"]["token"].max() + 1) % region.block_size else ""
        return f"the last {partial}block " + ("was never written" if kind == UNWRITTEN else "holds zeros")
    return ""


def zeroed(comparison: PoolComparison, drafts: Collection[str]) -> str:
    """The sentence on ZEROED words."""
    return _missing(comparison, ZEROED, drafts, "every byte of {} is zero", "holds zeros", "hold zeros")


def unwritten(comparison: PoolComparison, drafts: Collection[str]) -> str:
    """The sentence on UNWRITTEN words: never written, or written with poison that was copied from elsewhere,
    which stood there before anything was written.
    """
    sentence = _missing(
        comparison, UNWRITTEN, drafts, "no byte of {} was written", "was never written", "were never written"
    )
    runs = comparison.runs[comparison.runs["kind"] == UNWRITTEN]
    found = runs["found"]
    copied = (found["offset"] >= 0) & ~same_place(found["offset"], _offsets(comparison, runs))
    if comparison.engine is not None:
        copied = (found["offset"] >= 0) & (found["engine"] != comparison.engine)
    if not copied.any():
        return sentence
    memory = f"memory that {ENGINES[int(found['engine'][copied][0])]} had not written"
    if copied.all():
        where = layers_of(comparison, UNWRITTEN, drafts)
        return f"{share_of(comparison, UNWRITTEN)} in {where} were copied from {memory} by then"
    return f"{sentence}; some of the bytes found there were copied from {memory} by then"


def _offsets(comparison: PoolComparison, runs: Array) -> Array:
    """Where runs begin in the storage, bytes."""
    offsets = np.zeros(len(runs), dtype=np.int64)
    for index in np.unique(runs["region"]).tolist():
        region, mine = comparison.regions[index], runs["region"] == index
        names = ("block", "slot", "row", "plane") if region.kind == "attention" else ("block", "row")
        offsets[mine] = region.offset + 8 * runs["lane"][mine].astype(np.int64)
        for name, stride in zip(names, region.strides, strict=False):
            offsets[mine] += runs[name][mine].astype(np.int64) * stride
    return offsets


def garbled(comparison: PoolComparison, drafts: Collection[str]) -> str:
    """The sentence on GARBLED words."""
    where = layers_of(comparison, GARBLED)
    return f"{share_of(comparison, GARBLED)} in {where} hold {NO_ADDRESS}: torn, flipped or foreign"


def collateral(comparison: PoolComparison, drafts: Collection[str]) -> str:
    """The sentence on COLLATERAL words: which blocks changed, and whose KV they hold now. What the other
    engine computed, or its poison, came by a transfer.
    """
    runs = comparison.runs[comparison.runs["kind"] == COLLATERAL]
    blocks = sorted(
        {*runs["block"].tolist(), *comparison.raw["block"][comparison.raw["block"] >= 0].tolist()}
    )
    which = (
        f"block{'s' if len(blocks) > 1 else ''} {intervals(blocks)}"
        if blocks
        else "memory outside of all blocks"
    )
    found = runs["found"] if len(runs) else comparison.raw["found"]
    data = found[(found["kind"] == ATTENTION) | (found["kind"] == STATE)]
    tokens = set(data["token"].tolist())
    what = NO_ADDRESS
    if len(data):
        attention = data["kind"][0] == ATTENTION
        what = f"token{'s' if len(tokens) > 1 else ''} {intervals(tokens)}" if attention else "a state"
        what += (
            f" of owner {intervals(set(data['owner'].tolist()))} of {name_of(comparison, data['layer'][0])}"
        )
    verb = "hold" if len(blocks) > 1 else "holds"
    padding = " in the padding of its page" if not len(runs) and blocks else ""
    share = share_of(comparison, COLLATERAL)
    other = 0 if comparison.engine is None else 1 - comparison.engine
    came = np.isin(found["kind"], (ATTENTION, STATE, POISON)) & (found["engine"] == other)
    wrote = "a load wrote outside its own blocks" if came.any() else "something wrote where nothing was due"
    return f"{wrote}: {which} {verb} {what}{padding} ({share})"
