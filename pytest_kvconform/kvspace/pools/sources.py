"""The other engine, P: where its rows lie, who wrote its blocks, and when it held what was read from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pytest_kvconform.kvspace.pools.addresses import ATTENTION, POISON, Array
from pytest_kvconform.kvspace.pools.compare import PoolComparison
from pytest_kvconform.kvspace.pools.poison import same_place
from pytest_kvconform.kvspace.pools.regions import Region

TOO_EARLY = "the right remote blocks were read, but before P had computed what belongs there"
TOO_LATE = "the right remote blocks were read, but after they had been freed and overwritten"
EARLY_AND_LATE = (
    "the right remote blocks were read, some before P had computed what belongs there, and some after they "
    "had been freed and overwritten"
)


@dataclass(frozen=True)
class Source:
    """A rank of the other engine, P: where its rows lie. Some mistakes can be named only with this."""

    regions: tuple[Region, ...]
    tables: Mapping[tuple[str, int], Sequence[int]]  # (layer, owner) -> block id of each logical block
    # block id -> owners whose words were written into it, in the order of time, since it held poison
    writers: Mapping[int, Sequence[int]] = field(default_factory=dict)


def when_read(comparison: PoolComparison, wrong: Array, source: Source) -> str:
    """TOO_EARLY, TOO_LATE or EARLY_AND_LATE, if the words are from the very places where the source had the
    rows. "": they are from elsewhere, or it is not known.

    Poison of these places stood there before anything else did. Words of another request stood there before
    or after those that belong there: `writers` tells which.
    """
    found, times = wrong["found"], set[str]()
    if comparison.engine is None or not np.isin(found["kind"], (ATTENTION, POISON)).all():
        return ""
    if (found["engine"] == comparison.engine).any():
        return ""
    for run in sample(wrong):
        right, read = place_in(source, run["expected"]), place_in(source, run["found"])
        if right is None or read is None or not same_place(right, read):
            return ""
        times.add(_time_of(source, run["expected"], run["found"]))
    return (times.pop() if len(times) == 1 else "" if "" in times else EARLY_AND_LATE) if times else ""


def _time_of(source: Source, expected: np.void, found: np.void) -> str:
    """TOO_EARLY or TOO_LATE: when what was found stood in the place of what belongs there; "": not known."""
    region, owner = region_in(source, int(expected["layer"])), int(expected["owner"])
    if region is None:
        return ""
    block = source.tables[region.layer, owner][expected["token"] // region.block_size]
    writers = list(source.writers.get(int(block), ()))
    if owner not in writers:
        return ""
    first, last = writers.index(owner), len(writers) - writers[::-1].index(owner)
    if found["kind"] == POISON:
        return TOO_EARLY
    before, after = (int(found["owner"]) in some for some in (writers[:first], writers[last:]))
    return "" if before == after else TOO_EARLY if before else TOO_LATE


def sample(runs: Array) -> Array:
    return runs[:: max(1, len(runs) // 4096)]


def region_in(source: Source, layer: int) -> Region | None:
    return next(
        (region for region in source.regions if region.number == layer and region.kind == "attention"), None
    )


def place_in(source: Source, at: np.void) -> int | None:
    """The offset of an address in the source's storage, bytes; None if unknown. Poison holds its offset."""
    if at["kind"] == POISON:
        return int(at["offset"]) if at["offset"] >= 0 else None
    region = region_in(source, int(at["layer"])) if at["kind"] == ATTENTION else None
    table = source.tables.get((region.layer, int(at["owner"]))) if region is not None else None
    if region is None or table is None or at["token"] // region.block_size >= len(table):
        return None
    index = (
        table[at["token"] // region.block_size],
        at["token"] % region.block_size,
        at["head"] - region.first,
        at["plane"],
    )
    return (
        region.offset
        + sum(int(i) * s for i, s in zip(index, region.strides, strict=False))
        + 8 * int(at["lane"])
    )
