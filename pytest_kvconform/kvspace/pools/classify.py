"""What stands in rows that differ: a kind and an address for each word, neighbours joined into runs. NumPy only."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pytest_kvconform.kvspace.pools.regions import (
    ATTENTION,
    COORDINATES,
    FOREIGN,
    POISON,
    STATE,
    Array,
    Region,
    decode,
    encode,
)
from pytest_kvconform.kvspace.pools.words import follow, nobody
from pytest_kvconform.kvspace.rows.compare import GARBLED, MOVED, SAME, UNWRITTEN, ZEROED

COLLATERAL = GARBLED + 1  # changed although nothing was due there

# A run: neighbouring words of one row that are of one kind and whose contents are neighbours, too.
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
        ("stands", COORDINATES),  # the address of the first word's place
        ("belongs", COORDINATES),  # the address that it holds
    ]
)
_HIGH = 0x8080808080808080


def as_words(rows: Array) -> Array:
    """uint8 [..., byte] -> uint64 [..., lane]; a shorter last word is padded with zeros."""
    missing = -rows.shape[-1] % 8
    if missing:
        rows = np.concatenate([rows, np.zeros((*rows.shape[:-1], missing), dtype=np.uint8)], axis=-1)
    return np.ascontiguousarray(rows).view(np.uint64)


def decode_rows(rows: Array, aligned: bool = True) -> Array:
    """uint8 [..., byte] -> COORDINATES [..., lane].

    `aligned`: the rows begin at multiples of 8 in the storage, so that poison there can be decoded. Elsewhere it is known by its top bits
    and has no offset. The shorter last word follows the one before it, if it is what stands behind that one.
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
        follows[~data] = nobody(())
        follows[data & ((encode(follows) & bits) != words[..., -1])] = nobody(())
        found[..., -1] = follows
    if tail or not aligned:
        present = np.full(words.shape[-1], _HIGH, dtype=np.uint64)
        if tail:
            present[-1] &= np.uint64((1 << (8 * tail)) - 1)
        high = ((words & present) == present) & (found["kind"] == FOREIGN)
        if aligned:
            high[..., :-1] = False
        if tail and width > 8:  # so few bytes are poison only behind poison
            high[..., -1] &= high[..., -2] | (found["kind"][..., -2] == POISON)
        found["kind"][high] = POISON
    return found


def in_one_piece(rows: Array, known: Array) -> Array:
    """Whether each row, uint8 [row, byte], is a whole row of one place, a stretch of poison or all zero: its first word tells the rest.

    The rows begin at multiples of 8 in the storage, and their width is one. `known`: see `known_rows`.
    """
    words = as_words(rows)
    first = decode(words[:, 0])
    is_data = (first["kind"] == ATTENTION) | (first["kind"] == STATE)
    longer = is_data & (
        known[first["kind"], first["layer"] * is_data, first["plane"] * is_data] < words.shape[1]
    )
    return np.asarray((words == follow(first, words.shape[1])).all(axis=1) & ~longer)


def known_rows(regions: Iterable[Region]) -> Array:
    """[kind, layer, segment] -> words that a row there has, 0 where there is no such layer: what a decoded word must agree with."""
    lanes = np.zeros((4, 128, 4), dtype=np.int16)
    for region in regions:
        kind = ATTENTION if region.kind == "attention" else STATE
        for plane in range(2) if kind == ATTENTION else (region.segment,):
            lanes[kind, region.number, plane] = max(region.lanes, lanes[kind, region.number, plane])
    return lanes


def classify_rows(
    got: Array, want: Array, aligned: bool, known: Array, due: Array
) -> tuple[Array, Array, Array]:
    """Kinds, contents and places of the words of rows: (uint8, COORDINATES, COORDINATES), each [..., lane].

    `got` and `want` are uint8 [..., byte] of one region; `due` is bool [...]: rows in which something was due at all. A word that differs
    only in the rank that computed it is right. An address that cannot exist (`known`) is an accident: garbled.
    """
    holds, place = decode_rows(got, aligned), decode_rows(want, aligned)
    one, other = as_words(got), as_words(want)
    kinds = np.full(one.shape, GARBLED, dtype=np.uint8)
    is_data = (holds["kind"] == ATTENTION) | (holds["kind"] == STATE)
    exists = holds["lane"] < known[holds["kind"], holds["layer"] * is_data, holds["plane"] * is_data]
    holds[is_data & ~exists] = nobody(())
    kinds[is_data & exists] = MOVED
    zero = one == 0
    short = (
        got.shape[-1] > 8 and got.shape[-1] % 8 > 0
    )  # the last word: its few bytes may be 0, or right, by accident
    if short:
        zero[..., -1] &= zero[..., -2]
    kinds[zero] = ZEROED
    kinds[holds["kind"] == POISON] = UNWRITTEN
    was_data = (place["kind"] == ATTENTION) | (place["kind"] == STATE)
    kinds[~(was_data & due[..., None])] = COLLATERAL
    same = is_data & exists & was_data
    for name in "kind layer owner engine token head plane lane".split():
        same &= holds[name] == place[name]
    kinds[same | (one == other)] = SAME
    if short:
        behind = (kinds[..., -2] == MOVED) & is_data[..., -1] & exists[..., -1] & (kinds[..., -1] == SAME)
        kinds[..., -1][behind] = MOVED
    return kinds, holds, place


def runs_of(
    index: int, region: Region, at: tuple[Array, ...], kinds: Array, holds: Array, place: Array
) -> Array:
    """RUN of rows [row, lane]; `at` is (block, slot, row, plane), each [row]. Where nothing was due and nothing differs there is none."""
    first = np.ones(kinds.shape, dtype=bool)
    before, after = holds[:, :-1], holds[:, 1:]
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
    runs["kind"], runs["belongs"], runs["stands"] = kinds[row, lane], holds[row, lane], place[row, lane]
    return runs[(runs["kind"] != SAME) | _at_home(region, runs)]


def _at_home(region: Region, runs: Array) -> Array:
    """Whether data was due, of this very place. (Where nothing is due, the shadow may hold anything.)"""
    stands = runs["stands"]
    home = (
        (stands["layer"] == region.number)
        & (stands["head"] == region.first + runs["row"])
        & (stands["plane"] == runs["plane"])
    )
    if region.kind == "attention":
        return home & (stands["kind"] == ATTENTION) & (stands["token"] % region.block_size == runs["slot"])
    return home & (stands["kind"] == STATE)
