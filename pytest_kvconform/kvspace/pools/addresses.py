"""Addresses: what a word of a pool holds, its fields and their limits. words.py and poison.py encode them."""

from __future__ import annotations

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
_NO_ADDRESS = np.array((FOREIGN, *[-1] * (len(_NAMES) - 1)), dtype=COORDINATES)
LIMITS = {"layer": 128, "owner": 256, "engine": 2, "rank": 16, "lane": 288}


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


def no_address(shape: tuple[int, ...]) -> Array:
    """COORDINATES of kind FOREIGN."""
    found = np.empty(shape, dtype=COORDINATES)
    found[...] = _NO_ADDRESS  # whole records: five times as fast as field by field
    return found
