"""Poison: what stands in a pool wherever nothing has been written. Change the poison of the byte rig here.

Each aligned word of 8 bytes of poison holds its own offset in the storage, with the engine and rank whose
pool it is. So poison that a connector copied is recognised, and `mistakes.py` can tell from where it was
copied. Each byte of poison is 0x80 or above, and the last byte of each word of data is below: poison is never
taken for data.

The code of a word of poison, both ways, is in words.py: `FORMATS[POISON, 8]`, `mix` and `set_top_bits`. It is
made of shifts and exclusive ors alone. The word of a place is therefore the exclusive or of two words, one
common to its page of 2048 words and one of its place in the page: both are cached, and poisoning runs at
memory speed.

The poison of the engine rig is another one: the byte POISON of `rigs/engine/kv_access.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from pytest_kvconform.kvspace.pools.regions import Region
from pytest_kvconform.kvspace.pools.words import (
    FORMATS,
    POISON,
    TOP_BITS,
    Array,
    bits_of,
    in_range,
    mix,
    set_top_bits,
)

_PAGE = 1 << 11  # words of poison that share all but the low bits of their place


def poison(
    storage: Array, engine: int, rank: int, regions: Iterable[Region] = (), blocks: Any = None
) -> None:
    """Poison the whole storage with its padding, or only the rows of `blocks` (slots) of `regions`."""
    if blocks is None:
        whole = 0 if storage.ctypes.data % 8 else storage.nbytes // (8 * _PAGE)
        if whole:
            words = storage[: whole * 8 * _PAGE].view(np.uint64).reshape(whole, _PAGE)
            np.bitwise_xor(_of_pages(range(whole), engine, rank), _of_places(), out=words)
        for at in range(whole * 8 * _PAGE, storage.nbytes, 8 * _PAGE):
            end = min(at + 8 * _PAGE, storage.nbytes)
            storage[at:end] = poison_bytes(at, end, engine, rank)
        return
    for region in regions:
        view = region.of(storage)
        ends = [(n - 1) * s for n, s in zip(region.shape[1:], region.strides[1:], strict=True)]
        low, high = sum(end for end in ends if end < 0), sum(end for end in ends if end > 0) + 1
        for block in in_range("block", blocks, region.shape[0]).reshape(-1).tolist():
            start = region.offset + block * region.strides[0] + low
            fill = np.ascontiguousarray(poison_bytes(start, start + high - low, engine, rank))
            view[block] = np.ndarray(region.shape[1:], np.uint8, fill.data, -low, region.strides[1:])


def poison_bytes(start: int, end: int, engine: int, rank: int) -> Array:
    """The poison of bytes [start, end) of a storage, uint8. ValueError if a word cannot hold the offset."""
    pages = range(start // 8 // _PAGE, -(-end // 8 // _PAGE))
    words = _of_pages(pages, engine, rank) ^ _of_places()
    return words.view(np.uint8).reshape(-1)[start - 8 * _PAGE * pages.start :][: end - start]


@functools.lru_cache(1 << 14)
def _of_pages(pages: range, engine: int, rank: int) -> Array:
    """What the words of each of some pages have in common: uint64 [page, 1]."""
    form = FORMATS[POISON, 8]
    in_range("offset", [8 * _PAGE * pages.start, 8 * _PAGE * pages.stop - 8], 8 << 38)
    common = np.arange(pages.start, pages.stop, dtype=np.uint64) * np.uint64(_PAGE)
    common |= np.uint64(bits_of(form, engine=engine, rank=rank) | form.top)
    return set_top_bits(mix(common))[:, None]


@functools.cache
def _of_places() -> Array:
    """What the place within a page changes in a word: uint64 [word]."""
    return set_top_bits(mix(np.arange(_PAGE, dtype=np.uint64))) ^ TOP_BITS
