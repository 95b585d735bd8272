"""Poison: what stands in a pool wherever nothing has been written. Change the poison of the byte rig here.

Every 2 bytes of poison are a quiet NaN of bfloat16 and of float16, and every 4 bytes one of float32; of an 8
bit float every second element is NaN. So a connector that multiplies what nobody wrote by zero, or takes its
maximum, does not come to the right bytes by accident. A quiet NaN keeps its bits when it is copied as a
number.

Each aligned word of 8 bytes of poison also holds its own offset in the storage, modulo WRAP, and the engine
whose pool it is. So poison that a connector copied is recognised, and mistakes.py can tell from where it was
copied. Each byte of poison is 0x80 or above, and the last byte of each word of data is below: poison is never
taken for data.

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

POISON_FORMAT = Format(POISON, 24, (("place", 21), ("engine", 1)), 0b10)
PLACES = 1 << 21  # words; the word after so many holds the place of the first
WRAP = 8 * PLACES  # bytes
# Shifts of poison, left and right (-). With these, two halves of words of near places
# rarely make the word of a place.
_SHIFTS, _24 = (4, -3, 5), np.uint64((1 << 24) - 1)
TOP_BITS = np.uint64(0x8080808080808080)  # of the bytes of a word; set in poison
QUIET_NANS = np.uint64(0xFFC0FFC0FFC0FFC0)  # bits that four quiet NaNs of 2 bytes have
_PAGE = 1 << 11  # words of poison that share all but the low bits of their place


def poison(storage: Array, engine: int, regions: Iterable[Region] = (), blocks: Any = None) -> None:
    """Poison the whole storage with its padding, or only the rows of `blocks` (slots) of `regions`."""
    if blocks is None:
        whole = 0 if storage.ctypes.data % 8 else storage.nbytes // (8 * _PAGE)
        if whole:
            words = storage[: whole * 8 * _PAGE].view(np.uint64).reshape(whole, _PAGE)
            np.bitwise_xor(_of_pages(range(whole), engine), _of_places(), out=words)
        for at in range(whole * 8 * _PAGE, storage.nbytes, 8 * _PAGE):
            end = min(at + 8 * _PAGE, storage.nbytes)
            storage[at:end] = poison_bytes(at, end, engine)
        return
    for region in regions:
        view = region.of(storage)
        ends = [(n - 1) * s for n, s in zip(region.shape[1:], region.strides[1:], strict=True)]
        low, high = sum(end for end in ends if end < 0), sum(end for end in ends if end > 0) + 1
        for block in in_range("block", blocks, region.shape[0]).reshape(-1).tolist():
            start = region.offset + block * region.strides[0] + low
            fill = np.ascontiguousarray(poison_bytes(start, start + high - low, engine))
            view[block] = np.ndarray(region.shape[1:], np.uint8, fill.data, -low, region.strides[1:])


def poison_bytes(start: int, end: int, engine: int) -> Array:
    """The poison of bytes [start, end) of a storage, uint8."""
    pages = range(start // 8 // _PAGE, -(-end // 8 // _PAGE))
    words = _of_pages(pages, engine) ^ _of_places()
    return words.view(np.uint8).reshape(-1)[start - 8 * _PAGE * pages.start :][: end - start]


@functools.lru_cache(1 << 14)
def _of_pages(pages: range, engine: int) -> Array:
    """What the words of each of some pages have in common: uint64 [page, 1]."""
    common = np.arange(pages.start, pages.stop, dtype=np.uint64) * np.uint64(_PAGE) % np.uint64(PLACES)
    common |= np.uint64(bits_of(POISON_FORMAT, engine=engine) | POISON_FORMAT.top)
    return _spread(_mix(common))[:, None]


@functools.cache
def _of_places() -> Array:
    """What the place within a page changes in a word: uint64 [word]."""
    return _spread(_mix(np.arange(_PAGE, dtype=np.uint64))) ^ QUIET_NANS


def poison_word(bits: Array) -> Array:
    """The word of the bits of an address (`bits_of` POISON_FORMAT), in place."""
    return _spread(_mix(bits | np.uint64(POISON_FORMAT.top)))


def unpoison_word(words: Array) -> tuple[Array, Array]:
    """Whether words may be poison, and the bits of their addresses. The magic in the bits decides."""
    return are_nans(words), _unmix(_join(words))


def are_nans(words: Array) -> Array:
    """Whether words, uint64, are four quiet NaNs of 2 bytes, as poison is. No word of data is."""
    found: Array = (words & QUIET_NANS) == QUIET_NANS
    return found


def same_place(offsets: Array | int, others: Array | int) -> Any:
    """Whether offsets in a storage, bytes, are of one place as poison tells it."""
    return (np.asarray(offsets) - others) % WRAP == 0


def _mix(x: Array) -> Array:
    """Mix the bits of addresses of poison (24 bits), in place. mix(a ^ b) is mix(a) ^ mix(b)."""
    for shift in _SHIFTS:
        x ^= (x << np.uint64(shift)) & _24 if shift > 0 else x >> np.uint64(-shift)
    return x


def _unmix(x: Array) -> Array:
    """The inverse of `_mix`, in place. With S a shift, 1 + S is undone by 1 + S, 1 + S², 1 + S⁴ and so on."""
    for shift in reversed(_SHIFTS):
        while abs(shift) < 24:
            x ^= (x << np.uint64(shift)) & _24 if shift > 0 else x >> np.uint64(-shift)
            shift *= 2
    return x


def _spread(x: Array) -> Array:
    """Spread 24 bits over four quiet NaNs of 2 bytes, 6 bits each."""
    total = np.full(x.shape, QUIET_NANS)
    for number in range(4):
        total |= (x >> np.uint64(6 * number) & np.uint64(0x3F)) << np.uint64(16 * number)
    return total


def _join(x: Array) -> Array:
    """The inverse of `_spread`."""
    total = np.zeros(x.shape, dtype=np.uint64)
    for number in range(4):
        total |= (x >> np.uint64(16 * number) & np.uint64(0x3F)) << np.uint64(6 * number)
    return total
