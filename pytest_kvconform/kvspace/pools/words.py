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
| poison, 8 bytes, 8 aligned | - | - | 1 | - | 21: offset in the storage / 8 | - | - | - | 2 |

The owner is the number of the request whose token it is; of requests that share a prefix the first one owns
it. The lane is the place of the word in its row.

The shorter last word of a row holds the low bits of the whole word that belongs there. It is not decoded
alone: it is checked against the word before it. Torn, flipped or foreign bytes pass as an address with the
chance of the magic: 1 in 2048 (attention), 1 in 64, 128 and 32 (state of 8, 7 and 6 bytes). Four quiet NaNs
pass as poison with the chance of 1 in 4. `compare_pool` also requires that the layer and the lane exist.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pytest_kvconform.kvspace.pools.addresses import (
    ATTENTION,
    POISON,
    STATE,
    Array,
    Format,
    bits_of,
    in_range,
    no_address,
)
from pytest_kvconform.kvspace.pools.poison import PLACES, POISON_FORMAT, poison_word, unpoison_word

RESIDUE = 251  # a prime; a 6-byte word holds its tokens modulo this
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
    (POISON, 8): POISON_FORMAT,
}
_ODD, _ODD_AGAIN = 0x3690_FA66_A185_CC8F, 0x9E37_79B9_7F4A_7C15


def multiplier(bits: int) -> np.uint64:
    """The odd number by which addresses are multiplied, modulo 2 ** bits."""
    return np.uint64(_ODD % (1 << bits))


@functools.cache
def _inverse(odd: int, bits: int) -> np.uint64:
    return np.uint64(pow(odd, -1, 1 << bits))


def part(form: Format, **values: Any) -> Array:
    """What these fields add to the product of address and multiplier.

    The sum of the parts of all fields and of `magic_part` is the product: fields have disjoint bits.
    """
    bits, odd = bits_of(form, **values), multiplier(form.bits)
    # NumPy warns of overflow for single numbers, not for arrays
    if isinstance(bits, int) or not np.ndim(bits):
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


def state_tokens(form: Format, tokens: Any) -> Array:
    """The number of tokens in a state (1 to 16384) as its word holds it."""
    tokens = in_range("tokens of a state - 1", np.asarray(tokens, dtype=np.int64) - 1, 1 << 14) + 1
    return tokens % (RESIDUE if form.bits == 47 else 1 << 14)


def shorten(words: Array, size: int) -> Array:
    """Cut the last words of rows, in place, to their `size` bytes."""
    words &= np.uint64((1 << (8 * size - 1)) - 1)
    return words


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
            mine, values = unpoison_word(words)
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
            words[mine] = poison_word(bits_of(form, **values))
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
            place = (these["offset"][:, None] // 8 + np.arange(lanes)) % PLACES
            bits = bits_of(form, place=place, engine=these["engine"][:, None])
            words[mine] = poison_word(bits)
            continue
        values = {name: these[name] for name, _ in form.fields if name != "lane"}
        if kind == STATE:
            values["token"] = state_tokens(form, these["token"])
        words[mine] = fold(
            (part(form, **values) + magic_part(form))[:, None] + part(form, lane=np.arange(lanes)), form
        )
    words[first["lane"] > 0] = 0
    return words
