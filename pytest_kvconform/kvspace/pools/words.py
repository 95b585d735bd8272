"""The code of the words: an address <-> 8 bytes that hold it.

A row is cut into words of 8 bytes; the last one is shorter if the width is not a multiple of 8. A word is the
bits of its address under a fixed magic number, multiplied by an odd constant and folded, twice; all of that
can be undone. The last byte of a word is below 0x80, and every byte of poison is 0x80 or above: no stretch of
poison is ever equal to a word of data, whatever the alignment. Poison is mixed by shifts and exclusive ors
alone, see poison.py.

| word | layer | owner | engine | rank | token | head/channel | plane/segment | lane | magic |
|---|---|---|---|---|---|---|---|---|---|
| attention, 8 bytes | 7 bits | 8 | 1 | 4 | 14 | 8 | 1 | 9 | 11 |
| state, 8 bytes | 7 | 8 | 1 | - | 14 | 16 | 2 | 9 | 6 |
| state, 7 bytes (rows of 7 bytes) | 7 | 8 | 1 | - | 14 | 16 | 2 | - | 7 |
| state, 6 bytes (rows of 6 bytes) | 7 | 8 | 1 | - | 8: tokens mod 251 | 16 | 2 | - | 5 |
| poison, 8 bytes, 8 aligned | - | - | 1 | 4 | 38: offset in the storage / 8 | - | - | - | 13 |

The owner is the number of the request whose token it is; of requests that share a prefix the first one owns
it. The lane is the place of the word in its row.

The shorter last word of a row holds the low bits of the whole word that belongs there. It is not decoded
alone: it is checked against the word before it. Torn, flipped or foreign bytes pass as an address with the
chance of the magic: 1 in 2048 (attention), 1 in 64, 128 and 32 (state of 8, 7 and 6 bytes), 1 in 8192
(poison). `compare_pool` also requires that the layer and the lane exist.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# Kinds of an address. FOREIGN: the bytes are no address.
FOREIGN, ATTENTION, STATE, POISON = range(4)

# The address in one word. Of a state `head` is the global channel, `plane` the segment, `token` the number of
# tokens that went into it (in a 6-byte word mod 251), and `rank` -1, since the channels tell it. `offset` is
# bytes, of poison only. A field that does not apply is -1.
_NAMES = "kind layer owner engine rank token head plane lane offset".split()
_TYPES = "u1 i2 i2 i1 i1 i4 i4 i1 i2 i8".split()
COORDINATES = np.dtype(list(zip(_NAMES, _TYPES, strict=True)))
RESIDUE = 251  # a prime; a 6-byte word holds its tokens modulo this
_NO_ADDRESS = np.array((FOREIGN, *[-1] * (len(_NAMES) - 1)), dtype=COORDINATES)


@dataclass(frozen=True)
class Format:
    """The layout of one sort of word: fields from the lowest bit on. The rest, up to `bits`, is magic."""

    kind: int
    bits: int
    fields: tuple[tuple[str, int], ...]
    magic: int  # never 0, so that a word of zeros is no address

    @property
    def used(self) -> int:
        return sum(width for _, width in self.fields)

    @property
    def top(self) -> int:
        """The magic in its place. Its highest bit tells attention from state."""
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
# Shifts of poison, left and right (-). With these, two halves of words of near places never make the word of
# a place.
_SHIFTS, _56 = (6, -5, 8), np.uint64((1 << 56) - 1)
TOP_BITS = np.uint64(0x8080808080808080)  # of the bytes of a word; set in poison
LIMITS = {"layer": 128, "owner": 256, "engine": 2, "rank": 16, "lane": 288}


def in_range(name: str, values: Any, end: int | None = None) -> Array:
    """`values` as int64 if all are in [0, end). `end` is by default the limit of the field `name`.

    Raises ValueError otherwise: two addresses would have the same bytes.
    """
    values = np.asarray(values, dtype=np.int64)
    end = LIMITS[name] if end is None else end
    if values.size and (values.min() < 0 or values.max() >= end):
        raise ValueError(
            f"{name} {int(values.min())} to {int(values.max())} is beyond what a word holds: 0 to {end - 1}"
        )
    return values


def multiplier(bits: int) -> np.uint64:
    """The odd number by which addresses are multiplied, modulo 2 ** bits."""
    return np.uint64(_ODD % (1 << bits))


@functools.cache
def _inverse(odd: int, bits: int) -> np.uint64:
    return np.uint64(pow(odd, -1, 1 << bits))


def bits_of(form: Format, **values: Any) -> Any:
    """The bits of these fields in an address: an int if every value is an int, else an array (uint64)."""
    total: Any = 0
    arrays, shift = [], 0
    for name, width in form.fields:
        value = values.get(name)
        if isinstance(value, int):
            if not 0 <= value < 1 << width:
                in_range(name, value, 1 << width)
            total |= value << shift
        elif value is not None:
            arrays.append(in_range(name, value, 1 << width).astype(np.uint64) << np.uint64(shift))
        shift += width
    return sum(arrays, np.asarray(total, dtype=np.uint64)) if arrays else total


def part(form: Format, **values: Any) -> Array:
    """What these fields add to the product of address and multiplier.

    The sum of the parts of all fields and of `magic_part` is the product: fields have disjoint bits.
    """
    bits, odd = bits_of(form, **values), multiplier(form.bits)
    if isinstance(bits, int) or not np.ndim(
        bits
    ):  # NumPy warns of overflow for single numbers, not for arrays
        return np.asarray(int(bits) * int(odd) % (1 << 64), dtype=np.uint64)
    return np.asarray(bits * odd)


def magic_part(form: Format) -> np.uint64:
    """What the magic adds to the product, see `part`."""
    return np.uint64((form.top * int(multiplier(form.bits))) % (1 << 64))


def fold(words: Array, form: Format) -> Array:
    """Turn sums of parts into words, in place. Each bit depends on all, so a torn word loses its magic."""
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
    """Mix the bits of addresses of poison (56 bits), in place. mix(a ^ b) is mix(a) ^ mix(b)."""
    for shift in _SHIFTS:
        x ^= (x << np.uint64(shift)) & _56 if shift > 0 else x >> np.uint64(-shift)
    return x


def _unmix(x: Array) -> Array:
    """The inverse of `mix`, in place. With S a shift, 1 + S is undone by 1 + S, 1 + S², 1 + S⁴ and so on."""
    for shift in reversed(_SHIFTS):
        while abs(shift) < 56:
            x ^= (x << np.uint64(shift)) & _56 if shift > 0 else x >> np.uint64(-shift)
            shift *= 2
    return x


def state_tokens(form: Format, tokens: Any) -> Array:
    """The number of tokens in a state (1 to 16384) as its word holds it."""
    tokens = in_range("tokens of a state - 1", np.asarray(tokens, dtype=np.int64) - 1, 1 << 14) + 1
    return tokens % (RESIDUE if form.bits == 47 else 1 << 14)


def shorten(words: Array, size: int) -> Array:
    """Cut the last words of rows, in place, to their `size` bytes."""
    words &= np.uint64((1 << (8 * size - 1)) - 1)
    return words


def set_top_bits(x: Array) -> Array:
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
    """The inverse of `set_top_bits`."""
    x = x & np.uint64(0x7F7F7F7F7F7F7F7F)
    for low, high, shift in (
        (0x007F007F007F007F, 0x3F803F803F803F80, 1),
        (0x00003FFF00003FFF, 0x0FFFC0000FFFC000, 2),
        (0x000000000FFFFFFF, 0x00FFFFFFF0000000, 4),
    ):
        x = (x & np.uint64(low)) | ((x >> np.uint64(shift)) & np.uint64(high))
    return x


def no_address(shape: tuple[int, ...]) -> Array:
    """COORDINATES of kind FOREIGN."""
    found = np.empty(shape, dtype=COORDINATES)
    found[...] = _NO_ADDRESS  # whole records: five times as fast as field by field
    return found


def decode(words: Array, size: int = 8) -> Array:
    """Words (uint64) -> COORDINATES of the same shape. The kind is FOREIGN where a word is no address.

    `size` is the bytes of a word; for 6 and 7 the upper bytes are zero.
    """
    words = np.asarray(words, dtype=np.uint64)
    found = no_address(words.shape)
    for (kind, bytes_), form in FORMATS.items():
        if bytes_ != size:
            continue
        if kind == POISON:
            mine = (words & TOP_BITS) == TOP_BITS
            values = _unmix(_drop_top_bits(words))
        else:
            mine = words < np.uint64(1 << form.bits)
            values = _unfold(words.copy(), form)
        mine &= (values >> np.uint64(form.used)) == np.uint64(form.magic)
        if not mine.any():
            continue
        values = values[mine]
        read = no_address(values.shape)
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
    """COORDINATES -> words (uint64) of `size` bytes, 0 where the kind is FOREIGN. The inverse of `decode`."""
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
            words[mine] = set_top_bits(mix(bits_of(form, **values) | np.uint64(form.top)))
        else:
            words[mine] = fold(part(form, **values) + magic_part(form), form)
    return words


def rows_from(first: Array, lanes: int) -> Array:
    """Whole rows from the addresses of their first words, COORDINATES [row]: uint64 [row, lane].

    0 where the first word is no address, or not the first of its row.
    """
    words = np.zeros((len(first), lanes), dtype=np.uint64)
    for (kind, size), form in FORMATS.items():
        mine = first["kind"] == kind
        if size != 8 or not mine.any():
            continue
        these = first[mine]
        if kind == POISON:
            place = these["offset"][:, None] // 8 + np.arange(lanes)
            bits = bits_of(form, place=place, engine=these["engine"][:, None], rank=these["rank"][:, None])
            words[mine] = set_top_bits(mix(bits | np.uint64(form.top)))
            continue
        values = {name: these[name] for name, _ in form.fields if name != "lane"}
        if kind == STATE:
            values["token"] = state_tokens(form, these["token"])
        words[mine] = fold(
            (part(form, **values) + magic_part(form))[:, None] + part(form, lane=np.arange(lanes)), form
        )
    words[first["lane"] > 0] = 0
    return words
