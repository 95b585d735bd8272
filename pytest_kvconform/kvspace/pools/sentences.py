"""Sentences on bytes that are not just somewhere else: never written, zero, garbled, or written outside. And what all sentences share."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from pytest_kvconform.kvspace.pools.classify import COLLATERAL
from pytest_kvconform.kvspace.pools.compare import PoolComparison
from pytest_kvconform.kvspace.pools.regions import ATTENTION, STATE, Array, Region
from pytest_kvconform.kvspace.rows.compare import GARBLED, SAME, SEGMENTS, UNWRITTEN, ZEROED
from pytest_kvconform.kvspace.rows.explain import intervals

ENGINES = ("the prefiller", "the decoder")


def words_of(count: int) -> str:
    return f"{count} word{'s' if count != 1 else ''}"


def share_of(comparison: PoolComparison, kind: int) -> str:
    count = comparison.words[kind]
    return (
        f"all {words_of(count)}"
        if count == comparison.wrong
        else f"{count} of {comparison.wrong} wrong words"
    )


def names_of(names: Sequence[str], drafts: Collection[str] = ()) -> str:
    shown = [f"{name} (draft)" if name in drafts else name for name in names]
    return " and ".join(shown) if len(shown) < 3 else f"{shown[0]} and {len(shown) - 1} more layers"


def layers_of(comparison: PoolComparison, kind: int | None = None, drafts: Collection[str] = ()) -> str:
    """Layers with words of a kind, or with any that are wrong. Runs are bounded; the rows of the picture are not."""
    runs = comparison.runs
    regions = set(runs["region"][runs["kind"] == kind if kind is not None else runs["kind"] != SAME].tolist())
    regions |= {cells.region for cells in comparison.cells if kind is None or (cells.kinds == kind).any()}
    return names_of(list(dict.fromkeys(comparison.regions[index].layer for index in sorted(regions))), drafts)


def name_of(comparison: PoolComparison, number: int) -> str:
    return next(
        (region.layer for region in comparison.regions if region.number == number),
        f"layer {number} (not in this engine)",
    )


def _missing(
    comparison: PoolComparison, kind: int, drafts: Collection[str], never: str, one: str, many: str
) -> str:
    """Where the rows of one kind are: whole layers, whole segments, the first or the last block, else tokens.

    `never` is what happened to layers ("no byte of {} was written"), `one` to a token ("was never written"), `many` to several.
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
    tokens = set(some["stands"]["token"].tolist())
    if len(places) == 1 and "" not in places:
        return f"{places.pop()} ({share})"
    return f"token{'s' if len(tokens) > 1 else ''} {intervals(tokens)} {many if len(tokens) > 1 else one} ({share})"


def _whole(comparison: PoolComparison, region: Region, runs: Array, kind: int) -> bool:
    """Whether all that was due in a region is of one kind."""
    return bool((runs["kind"] == kind).all()) and set(runs["block"].tolist()) >= set(
        comparison.due.get(region.layer, ())
    )


def _block_place(comparison: PoolComparison, region: Region, runs: Array, kind: int) -> str:
    """What happened to the first or the last block, if all of that block is of one kind and nothing else is; "" otherwise."""
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
        window = " of the window" if rows["stands"]["token"].min() >= region.block_size else ""
        return f"the first block{window} " + ("was never read" if kind == UNWRITTEN else "holds zeros")
    if block == due[-1]:
        partial = "(partial) " if (rows["stands"]["token"].max() + 1) % region.block_size else ""
        return f"the last {partial}block " + ("was never written" if kind == UNWRITTEN else "holds zeros")
    return ""


def zeroed(comparison: PoolComparison, drafts: Collection[str]) -> str:
    return _missing(comparison, ZEROED, drafts, "every byte of {} is zero", "holds zeros", "hold zeros")


def unwritten(comparison: PoolComparison, drafts: Collection[str]) -> str:
    sentence = _missing(
        comparison, UNWRITTEN, drafts, "no byte of {} was written", "was never written", "were never written"
    )
    runs = comparison.runs[comparison.runs["kind"] == UNWRITTEN]
    held = runs["belongs"]
    foreign = (held["offset"] >= 0) & (held["offset"] != _offsets(comparison, runs))
    if comparison.engine is not None:
        foreign = (held["offset"] >= 0) & (held["engine"] != comparison.engine)
    if not foreign.any():
        return sentence
    engine = ENGINES[int(held["engine"][foreign][0])]
    return f"{sentence}; what stands there was copied from memory that {engine} never wrote"


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
    where = layers_of(comparison, GARBLED)
    return f"{share_of(comparison, GARBLED)} in {where} hold bytes that are nobody's: torn, flipped or from elsewhere"


def collateral(comparison: PoolComparison, drafts: Collection[str]) -> str:
    runs = comparison.runs[comparison.runs["kind"] == COLLATERAL]
    blocks = sorted(
        {*runs["block"].tolist(), *comparison.raw["block"][comparison.raw["block"] >= 0].tolist()}
    )
    which = (
        f"block{'s' if len(blocks) > 1 else ''} {intervals(blocks)}"
        if blocks
        else "memory outside of all blocks"
    )
    holds = runs["belongs"] if len(runs) else comparison.raw["holds"]
    data = holds[(holds["kind"] == ATTENTION) | (holds["kind"] == STATE)]
    if not len(data):
        what = "bytes that are nobody's"
    elif data["kind"][0] == ATTENTION:
        what = f"token{'s' if len(set(data['token'].tolist())) > 1 else ''} {intervals(set(data['token'].tolist()))}"
        what += (
            f" of owner {intervals(set(data['owner'].tolist()))} of {name_of(comparison, data['layer'][0])}"
        )
    else:
        what = f"a state of owner {intervals(set(data['owner'].tolist()))} of {name_of(comparison, data['layer'][0])}"
    holding = "hold" if len(blocks) > 1 else "holds"
    padding = " in the padding of its page" if not len(runs) and blocks else ""
    return f"wrote outside its own blocks: {which} {holding} {what}{padding} ({share_of(comparison, COLLATERAL)})"
