"""Words that hold their own address: the code, both ways. NumPy only.

A row is cut into words of 8 bytes, the last one shorter if the width is no multiple of 8. A word is the bits of its address under a fixed
magic number, multiplied by an odd constant and folded, twice, which can be undone. Its last byte is below 0x80; every byte of poison
is 0x80 or above, so no stretch of poison is ever equal to a word of data, whatever the alignment. Poison fills whole pools, so it is mixed
by shifts and exclusive ors alone: the word of a place is then the exclusive or of two words, one from a table and one common to its page.

| word | layer | owner | engine | rank | token | head/channel | plane/segment | lane | magic |
|---|---|---|---|---|---|---|---|---|---|
| attention, 8 bytes | 7 bits | 8 | 1 | 4 | 14 | 8 | 1 | 9 | 11 |
| state, 8 bytes | 7 | 8 | 1 | - | 14 | 16 | 2 | 9 | 6 |
| state, 7 bytes (rows of 7 bytes) | 7 | 8 | 1 | - | 14 | 16 | 2 | - | 7 |
| state, 6 bytes (rows of 6 bytes) | 7 | 8 | 1 | - | 8: tokens mod 251 | 16 | 2 | - | 5 |
| poison, 8 bytes, 8 aligned | - | - | 1 | 4 | 38: offset in the storage / 8 | - | - | - | 13 |

The shorter last word of a row that has 8-byte words before it holds the low bits of the word that would stand there: it is checked
against the word before it and not decoded alone. A torn or flipped word or foreign bytes pass as another
address with the chance of the magic: 1 in 2048 (attention), 1 in 64, 128 and 32 (state of 8, 7 and 6 bytes), 1 in 8192 (poison);
compare_pool asks for a layer and a lane that exist, too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# Kinds of an address.
FOREIGN, ATTENTION, STATE, POISON = range(4)

# One decoded word. `head` is the global channel and `plane` the segment of a state; `rank` is -1 for a state (its channels tell);
# `token` of a state is the number of tokens that it stands for, of a 6-byte word that number mod 251; `offset` is bytes, for poison.
# What does not apply is -1.
_NAMES = "kind layer owner engine rank token head plane lane offset".split()
_TYPES = "u1 i2 i2 i1 i1 i4 i4 i1 i2 i8".split()
COORDINATES = np.dtype(list(zip(_NAMES, _TYPES, strict=True)))
RESIDUE = 251  # a prime: of the tokens in a 6-byte word
_NOBODY = np.array((FOREIGN, *[-1] * (len(_NAMES) - 1)), dtype=COORDINATES)


@dataclass(frozen=True)
class Format:
    """The bits of one sort of word, lowest first; the rest up to `bits` is magic."""

    kind: int
    bits: int
    fields: tuple[tuple[str, int], ...]
    magic: int  # never 0: a word of zeros is nobody's

    @property
    def used(self) -> int:
        return sum(width for _, width in self.fields)

    @property
    def top(self) -> int:
        """The sort itself is part of the magic: the top bit tells attention from state."""
        return self.magic << self.used


_WHO = (("layer", 7), ("owner", 8), ("engine", 1))
FORMATS = {
    (ATTENTION, 8): Format(
        ATTENTION,
        63,
        (("lane", 9), ("plane", 1), ("head", 8), ("token", 14), *_WHO, ("rank", 4)),
        0b101_1001_0110,
    ),
    (STATE, 8): Format(STATE, 63, (("lane", 9), ("plane", 2), ("head", 16), ("token", 14), *_WHO), 0b01_0011),
    (STATE, 7): Format(STATE, 55, (("plane", 2), ("head", 16), ("token", 14), *_WHO), 0b101_1001),
    (STATE, 6): Format(STATE, 47, (("plane", 2), ("head", 16), ("token", 8), *_WHO), 0b1_0011),
    (POISON, 8): Format(POISON, 56, (("place", 38), ("engine", 1), ("rank", 4)), 0b1_0110_1100_1011),
}
_ODD, _ODD_AGAIN = 0x3690_FA66_A185_CC8F, 0x9E37_79B9_7F4A_7C15
_SHIFTS, _56 = (
    (6, -5, 8),
    np.uint64((1 << 56) - 1),
)  # of poison: no place torn at a byte and joined with a near one is a place
LIMITS = {"layer": 128, "owner": 256, "engine": 2, "rank": 16, "lane": 288}


def limit(name: str, values: Any, end: int | None = None) -> Array:
    """`values` as int64 if all are within [0, end); ValueError otherwise: two addresses would have the same bytes."""
    values = np.asarray(values, dtype=np.int64)
    end = LIMITS[name] if end is None else end
    if values.size and (values.min() < 0 or values.max() >= end):
        raise ValueError(
            f"{name} {int(values.min())} to {int(values.max())} is beyond what a word can name: 0 to {end - 1}"
        )
    return values


def multiplier(bits: int) -> np.uint64:
    """The odd number that addresses are multiplied by, modulo 2 ** bits."""
    return np.uint64(_ODD % (1 << bits))


@functools.cache
def _inverse(odd: int, bits: int) -> np.uint64:
    return np.uint64(pow(odd, -1, 1 << bits))


def bits_of(form: Format, **values: Any) -> Any:
    """The bits of these fields in an address: an int if every value is one, else an array (uint64)."""
    total: Any = 0
    arrays, shift = [], 0
    for name, width in form.fields:
        value = values.get(name)
        if isinstance(value, int):
            if not 0 <= value < 1 << width:
                limit(name, value, 1 << width)
            total |= value << shift
        elif value is not None:
            arrays.append(limit(name, value, 1 << width).astype(np.uint64) << np.uint64(shift))
        shift += width
    return sum(arrays, np.asarray(total, dtype=np.uint64)) if arrays else total


def part(form: Format, **values: Any) -> Array:
    """The share of these fields in the product. Shares of all fields and of the magic are added (disjoint bits, so a sum is an or)."""
    bits, odd = bits_of(form, **values), multiplier(form.bits)
    if isinstance(bits, int) or not np.ndim(
        bits
    ):  # NumPy warns when the product of single numbers overflows; that of arrays may
        return np.asarray(int(bits) * int(odd) % (1 << 64), dtype=np.uint64)
    return np.asarray(bits * odd)


def sign(form: Format) -> np.uint64:
    return np.uint64((form.top * int(multiplier(form.bits))) % (1 << 64))


def fold(words: Array, form: Format) -> Array:
    """Sums of parts, in place, into words: each bit comes to depend on all, so that a torn word does not keep its magic."""
    mask, half = np.uint64((1 << form.bits) - 1), np.uint64((form.bits + 1) // 2)
    words &= mask
    words ^= words >> half
    words *= np.uint64(_ODD_AGAIN % (1 << form.bits))
    words &= mask
    words ^= words >> half
    return words


def _unfold(words: Array, form: Format) -> Array:
    """The inverse of `part` and `fold`, in place."""
    mask, half = np.uint64((1 << form.bits) - 1), np.uint64((form.bits + 1) // 2)
    for odd in (_ODD_AGAIN, _ODD):
        words ^= words >> half
        words *= _inverse(odd, form.bits)
        words &= mask
    return words


def mix(x: Array) -> Array:
    """Addresses of poison (56 bits), in place, so that bits depend on each other. mix(a ^ b) is mix(a) ^ mix(b)."""
    for shift in _SHIFTS:
        x ^= (x << np.uint64(shift)) & _56 if shift > 0 else x >> np.uint64(-shift)
    return x


def _unmix(x: Array) -> Array:
    """The inverse of `mix`, in place: 1 + S is undone by 1 + S, 1 + S², 1 + S⁴ and so on, where S is a shift."""
    for shift in reversed(_SHIFTS):
        while abs(shift) < 56:
            x ^= (x << np.uint64(shift)) & _56 if shift > 0 else x >> np.uint64(-shift)
            shift *= 2
    return x


def state_tokens(form: Format, tokens: Any) -> Array:
    """Tokens of a state (1 to 16384) as its word holds them."""
    tokens = limit("tokens of a state - 1", np.asarray(tokens, dtype=np.int64) - 1, 1 << 14) + 1
    return tokens % (RESIDUE if form.bits == 47 else 1 << 14)


def shorten(words: Array, size: int) -> Array:
    """The last word of a row, in place, when only `size` bytes of it are there."""
    words &= np.uint64((1 << (8 * size - 1)) - 1)
    return words


def spread(x: Array) -> Array:
    """56 bits, in place, into 8 bytes of 7 bits, each with its top bit set."""
    for low, high, shift in (
        (0x000000000FFFFFFF, 0x00FFFFFFF0000000, 4),
        (0x00003FFF00003FFF, 0x0FFFC0000FFFC000, 2),
        (0x007F007F007F007F, 0x3F803F803F803F80, 1),
    ):
        upper = x & np.uint64(high)
        upper <<= np.uint64(shift)
        x &= np.uint64(low)
        x |= upper
    x |= np.uint64(0x8080808080808080)
    return x


def gather(x: Array) -> Array:
    """The inverse of `spread`."""
    x = x & np.uint64(0x7F7F7F7F7F7F7F7F)
    for low, high, shift in (
        (0x007F007F007F007F, 0x3F803F803F803F80, 1),
        (0x00003FFF00003FFF, 0x0FFFC0000FFFC000, 2),
        (0x000000000FFFFFFF, 0x00FFFFFFF0000000, 4),
    ):
        x = (x & np.uint64(low)) | ((x >> np.uint64(shift)) & np.uint64(high))
    return x


def nobody(shape: tuple[int, ...]) -> Array:
    """COORDINATES of kind FOREIGN."""
    found = np.empty(shape, dtype=COORDINATES)
    found[...] = _NOBODY  # whole records: five times as fast as field by field
    return found


def decode(words: Array, size: int = 8) -> Array:
    """Words (uint64; of `size` 6 or 7 bytes: the upper ones zero) -> COORDINATES of the same shape; kind FOREIGN where it is nobody's."""
    words = np.asarray(words, dtype=np.uint64)
    found = nobody(words.shape)
    for (kind, bytes_), form in FORMATS.items():
        if bytes_ != size:
            continue
        if kind == POISON:
            mine = (words & np.uint64(0x8080808080808080)) == np.uint64(0x8080808080808080)
            values = _unmix(gather(words))
        else:
            mine = words < np.uint64(1 << form.bits)
            values = _unfold(words.copy(), form)
        mine &= (values >> np.uint64(form.used)) == np.uint64(form.magic)
        if not mine.any():
            continue
        values = values[mine]
        read = nobody(values.shape)
        read["kind"] = kind
        for name, width in form.fields:
            field = (values & np.uint64((1 << width) - 1)).astype(np.int64)
            if name == "place":
                read["offset"] = 8 * field
            else:
                read[name] = field
            values >>= np.uint64(width)
        if kind == STATE:
            if size < 8:
                read["lane"] = 0
            if size > 6:
                read["token"][read["token"] == 0] = 1 << 14
        if len(values) == words.size:  # all of one form, as most rows are
            return read.reshape(words.shape)
        found[mine] = read
    return found


def encode(coordinates: Array, size: int = 8) -> Array:
    """COORDINATES -> words (uint64) of `size` bytes; 0 where the kind is FOREIGN. The inverse of `decode`."""
    words = np.zeros(coordinates.shape, dtype=np.uint64)
    for (kind, bytes_), form in FORMATS.items():
        mine = coordinates["kind"] == kind
        if bytes_ != size or not mine.any():
            continue
        these = coordinates[mine]
        values = {name: these["offset"] // 8 if name == "place" else these[name] for name, _ in form.fields}
        if kind == STATE:
            values["token"] = state_tokens(form, these["token"]) if size > 6 else these["token"]
        if kind == POISON:
            words[mine] = spread(mix(bits_of(form, **values) | np.uint64(form.top)))
        else:
            words[mine] = fold(part(form, **values) + sign(form), form)
    return words


def follow(first: Array, lanes: int) -> Array:
    """The words of whole rows that begin with these addresses, COORDINATES [row]: uint64 [row, lane]; 0 where nobody knows."""
    words = np.zeros((len(first), lanes), dtype=np.uint64)
    for (kind, size), form in FORMATS.items():
        mine = first["kind"] == kind
        if size != 8 or not mine.any():
            continue
        these = first[mine]
        if kind == POISON:
            place = these["offset"][:, None] // 8 + np.arange(lanes)
            bits = bits_of(form, place=place, engine=these["engine"][:, None], rank=these["rank"][:, None])
            words[mine] = spread(mix(bits | np.uint64(form.top)))
            continue
        values = {name: these[name] for name, _ in form.fields if name != "lane"}
        if kind == STATE:
            values["token"] = state_tokens(form, these["token"])
        words[mine] = fold(
            (part(form, **values) + sign(form))[:, None] + part(form, lane=np.arange(lanes)), form
        )
    words[first["lane"] > 0] = 0  # another row begins within this one
    return words
