"""Kinds of words: each word of a row that differs gets a kind and the address that it holds.

Neighbouring words of one kind with neighbouring addresses are joined into a run.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pytest_kvconform.kvspace.kinds import COLLATERAL, GARBLED, MOVED, SAME, UNWRITTEN, ZEROED
from pytest_kvconform.kvspace.pools.addresses import (
    ATTENTION,
    COORDINATES,
    FOREIGN,
    POISON,
    STATE,
    Array,
    no_address,
)
from pytest_kvconform.kvspace.pools.poison import TOP_BITS
from pytest_kvconform.kvspace.pools.regions import Region
from pytest_kvconform.kvspace.pools.words import decode, encode, rows_from

# A run: neighbouring words of one row, of one kind, that hold neighbouring addresses.
RUN = np.dtype(
    [
        ("region", "i2"),  # index into PoolComparison.regions
        ("block", "i4"),  # block id; slot of a state
        ("slot", "i4"),  # token in the block; 0 of a state
        ("row", "i4"),  # head or channel as this rank counts them
        ("plane", "i1"),  # 0 K, 1 V; segment of a state
        ("lane", "i2"),  # of the first word
        ("words", "i4"),
        ("kind", "u1"),
        ("expected", COORDINATES),  # the address that the first word should hold
        ("found", COORDINATES),  # the address that the first word holds
    ]
)


def as_words(rows: Array) -> Array:
    """uint8 [..., byte] -> uint64 [..., lane]; a shorter last word is padded with zeros."""
    missing = -rows.shape[-1] % 8
    if missing:
        rows = np.concatenate([rows, np.zeros((*rows.shape[:-1], missing), dtype=np.uint8)], axis=-1)
    return np.ascontiguousarray(rows).view(np.uint64)


def decode_rows(rows: Array, aligned: bool = True) -> Array:
    """The addresses in rows: uint8 [..., byte] -> COORDINATES [..., lane].

    `aligned`: the rows begin at multiples of 8 in the storage, so that poison in them can be decoded. In
    other rows poison is recognised by its top bits, and its offset is -1. The shorter last word gets the
    address after that of the word before it, if it holds the bits of that address.
    """
    width, words = rows.shape[-1], as_words(rows)
    found = decode(words, min(width, 8))
    tail = width % 8
    if tail and width > 8:
        follows = found[..., -2].copy()
        follows["lane"] += 1
        bits = np.uint64((1 << (8 * tail - 1)) - 1)
        data = (follows["kind"] == ATTENTION) | (follows["kind"] == STATE)
        data &= follows["lane"] < 288
        follows[~data] = no_address(())
        follows[data & ((encode(follows) & bits) != words[..., -1])] = no_address(())
        found[..., -1] = follows
    if tail or not aligned:
        present = np.full(words.shape[-1], TOP_BITS)
        if tail:
            present[-1] &= np.uint64((1 << (8 * tail)) - 1)
        high = ((words & present) == present) & (found["kind"] == FOREIGN)
        if aligned:
            high[..., :-1] = False
        if tail and width > 8:  # so few bytes count as poison only after a word of poison
            high[..., -1] &= high[..., -2] | (found["kind"][..., -2] == POISON)
        found["kind"][high] = POISON
    return found


def in_one_piece(rows: Array, known: Array) -> Array:
    """Whether the first word of each row tells the rest: a whole row of one place, poison, or all zero.

    `rows` is uint8 [row, byte]; they begin at multiples of 8 in the storage, and their width is a multiple of
    8. `known`: see `known_rows`.
    """
    words = as_words(rows)
    first = decode(words[:, 0])
    is_data = (first["kind"] == ATTENTION) | (first["kind"] == STATE)
    longer = is_data & (
        known[first["kind"], first["layer"] * is_data, first["plane"] * is_data] < words.shape[1]
    )
    return np.asarray((words == rows_from(first, words.shape[1])).all(axis=1) & ~longer)


def known_rows(regions: Iterable[Region]) -> Array:
    """The words of a row by [kind, layer, plane or segment]; 0 where no such layer exists.

    An address whose lane is not below this number cannot exist.
    """
    lanes = np.zeros((4, 128, 4), dtype=np.int16)
    for region in regions:
        kind = ATTENTION if region.kind == "attention" else STATE
        for plane in range(2) if kind == ATTENTION else (region.segment,):
            lanes[kind, region.number, plane] = max(region.lanes, lanes[kind, region.number, plane])
    return lanes


def classify_rows(
    got: Array, want: Array, aligned: bool, known: Array, due: Array
) -> tuple[Array, Array, Array]:
    """Kinds, found and expected addresses of words: (uint8, COORDINATES, COORDINATES), each [..., lane].

    `got` and `want` are uint8 [..., byte] of one region. `due` is bool [...]: False for rows in which nothing
    was due. A word whose address differs only in the rank that computed it is correct: several ranks compute
    the same row. An address that cannot exist (see `known_rows`) is an accident, and the word is garbled.
    """
    found, expected = decode_rows(got, aligned), decode_rows(want, aligned)
    one, other = as_words(got), as_words(want)
    kinds = np.full(one.shape, GARBLED, dtype=np.uint8)
    is_data = (found["kind"] == ATTENTION) | (found["kind"] == STATE)
    exists = found["lane"] < known[found["kind"], found["layer"] * is_data, found["plane"] * is_data]
    found[is_data & ~exists] = no_address(())
    kinds[is_data & exists] = MOVED
    zero = one == 0
    # the few bytes of the last word may be 0 or correct by accident
    short = got.shape[-1] > 8 and got.shape[-1] % 8 > 0
    if short:
        zero[..., -1] &= zero[..., -2]
    kinds[zero] = ZEROED
    kinds[found["kind"] == POISON] = UNWRITTEN
    was_data = (expected["kind"] == ATTENTION) | (expected["kind"] == STATE)
    kinds[~(was_data & due[..., None])] = COLLATERAL
    same = is_data & exists & was_data
    for name in "kind layer owner engine token head plane lane".split():
        same &= found[name] == expected[name]
    kinds[same | (one == other)] = SAME
    if short:
        after = (kinds[..., -2] == MOVED) & is_data[..., -1] & exists[..., -1] & (kinds[..., -1] == SAME)
        kinds[..., -1][after] = MOVED
    return kinds, found, expected


def runs_of(
    index: int, region: Region, at: tuple[Array, ...], kinds: Array, found: Array, expected: Array
) -> Array:
    """RUN of rows [row, lane].

    `at` is (block, slot, row, plane), each [row]; the other arrays are the result of `classify_rows`. Correct
    words where nothing was due have no run.
    """
    first = np.ones(kinds.shape, dtype=bool)
    before, after = found[:, :-1], found[:, 1:]
    joined = kinds[:, :-1] == kinds[:, 1:]
    for name in "kind layer owner engine rank token head plane".split():
        joined &= before[name] == after[name]
    joined &= (after["lane"] - before["lane"] == 1) | (after["lane"] == -1)
    joined &= (after["offset"] - before["offset"] == 8) | (after["offset"] == -1)
    first[:, 1:] = ~joined
    row, lane = np.nonzero(first)
    ends = np.append(np.flatnonzero(first.ravel())[1:], first.size)
    runs = np.empty(len(row), dtype=RUN)
    runs["region"], runs["lane"] = index, lane
    for name, values in zip(("block", "slot", "row", "plane"), at, strict=True):
        runs[name] = values[row]
    runs["words"] = ends - np.flatnonzero(first.ravel())
    runs["kind"], runs["found"], runs["expected"] = kinds[row, lane], found[row, lane], expected[row, lane]
    return runs[(runs["kind"] != SAME) | _was_due(region, runs)]


def _was_due(region: Region, runs: Array) -> Array:
    """Whether the shadow has data of this very place. Where nothing was due it may hold other data."""
    expected = runs["expected"]
    here = (
        (expected["layer"] == region.number)
        & (expected["head"] == region.first + runs["row"])
        & (expected["plane"] == runs["plane"])
    )
    if region.kind == "attention":
        slot = expected["token"] % region.block_size
        return here & (expected["kind"] == ATTENTION) & (slot == runs["slot"])
    return here & (expected["kind"] == STATE)
