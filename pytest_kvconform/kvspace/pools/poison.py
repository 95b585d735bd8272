"""Poison: what stands in a pool wherever nothing has been written. Change the poison of the byte rig here.

Each aligned word of 8 bytes of poison holds its own offset in the storage, and the engine and rank whose
pool it is. So poison that a connector copied is recognised, and mistakes.py can tell from where it was
copied. Each byte of poison is 0x80 or above, and the last byte of each word of data is below: poison is
never taken for data.

`poison` writes poison, `poison_bytes` returns that of any stretch of bytes; `poison_word` and
`unpoison_word` are the code of a word. It is made of shifts and exclusive ors alone: a word is the
exclusive or of two words, one common to its page of 2048 words and one of its place in the page. Both are
cached, so poisoning is fast.

The poison of the engine rig is another one: the byte POISON of `rigs/engine/kv_access.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_kvconform.kvspace.pools.addresses import POISON, Array, Format, bits_of, in_range

if TYPE_CHECKING:
    from pytest_kvconform.kvspace.pools.regions import Region

POISON_FORMAT = Format(POISON, 56, (("place", 38), ("engine", 1), ("rank", 4)), 0b1_0110_1100_1011)
# Shifts of poison, left and right (-). With these, two halves of words of near places
# never make the word of a place.
_SHIFTS, _56 = (6, -5, 8), np.uint64((1 << 56) - 1)
TOP_BITS = np.uint64(0x8080808080808080)  # of the bytes of a word; set in poison
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
    """The poison of bytes [start, end) of a storage, uint8. ValueError if an offset is too large."""
    pages = range(start // 8 // _PAGE, -(-end // 8 // _PAGE))
    words = _of_pages(pages, engine, rank) ^ _of_places()
    return words.view(np.uint8).reshape(-1)[start - 8 * _PAGE * pages.start :][: end - start]


@functools.lru_cache(1 << 14)
def _of_pages(pages: range, engine: int, rank: int) -> Array:
    """What the words of each of some pages have in common: uint64 [page, 1]."""
    in_range("offset", [8 * _PAGE * pages.start, 8 * _PAGE * pages.stop - 8], 8 << 38)
    common = np.arange(pages.start, pages.stop, dtype=np.uint64) * np.uint64(_PAGE)
    common |= np.uint64(bits_of(POISON_FORMAT, engine=engine, rank=rank) | POISON_FORMAT.top)
    return _set_top_bits(_mix(common))[:, None]


@functools.cache
def _of_places() -> Array:
    """What the place within a page changes in a word: uint64 [word]."""
    return _set_top_bits(_mix(np.arange(_PAGE, dtype=np.uint64))) ^ TOP_BITS


def poison_word(bits: Array) -> Array:
    """The word of the bits of an address (`bits_of` POISON_FORMAT), in place."""
    return _set_top_bits(_mix(bits | np.uint64(POISON_FORMAT.top)))


def unpoison_word(words: Array) -> tuple[Array, Array]:
    """Whether words may be poison, and the bits of their addresses. The magic in the bits decides."""
    return (words & TOP_BITS) == TOP_BITS, _unmix(_drop_top_bits(words))


def _mix(x: Array) -> Array:
    """Mix the bits of addresses of poison (56 bits), in place. mix(a ^ b) is mix(a) ^ mix(b)."""
    for shift in _SHIFTS:
        x ^= (x << np.uint64(shift)) & _56 if shift > 0 else x >> np.uint64(-shift)
    return x


def _unmix(x: Array) -> Array:
    """The inverse of `_mix`, in place. With S a shift, 1 + S is undone by 1 + S, 1 + S², 1 + S⁴ and so on."""
    for shift in reversed(_SHIFTS):
        while abs(shift) < 56:
            x ^= (x << np.uint64(shift)) & _56 if shift > 0 else x >> np.uint64(-shift)
            shift *= 2
    return x


def _set_top_bits(x: Array) -> Array:
    """Spread 56 bits, in place, over 8 bytes of 7 bits, and set the top bit of each byte."""
    for low, high, shift in (
        (0x000000000FFFFFFF, 0x00FFFFFFF0000000, 4),
        (0x00003FFF00003FFF, 0x0FFFC0000FFFC000, 2),
        (0x007F007F007F007F, 0x3F803F803F803F80, 1),
    ):
        upper = x & np.uint64(high)
        upper <<= np.uint64(shift)
        x &= np.uint64(low)
        x |= upper
    x |= TOP_BITS
    return x


def _drop_top_bits(x: Array) -> Array:
    """The inverse of `_set_top_bits`."""
    x = x & np.uint64(0x7F7F7F7F7F7F7F7F)
    for low, high, shift in (
        (0x007F007F007F007F, 0x3F803F803F803F80, 1),
        (0x00003FFF00003FFF, 0x0FFFC0000FFFC000, 2),
        (0x000000000FFFFFFF, 0x00FFFFFFF0000000, 4),
    ):
        x = (x & np.uint64(low)) | ((x >> np.uint64(shift)) & np.uint64(high))
    return x
