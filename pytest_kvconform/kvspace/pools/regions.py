"""Regions: where the rows of a layer lie in a rank's storage. And writing rows of tokens and of states there.

The code of the words is in words.py, poison in poison.py.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_kvconform.kvspace.pools.addresses import ATTENTION, LIMITS, STATE, Array, in_range
from pytest_kvconform.kvspace.pools.words import FORMATS, fold, magic_part, part, shorten, state_tokens

_CHUNK = 1 << 15  # words worked on at a time: fits the second level cache


@dataclass(frozen=True)
class Region:
    """Where the rows of one layer (attention), or of one segment of it (state), lie in a rank's storage."""

    layer: str  # full name
    number: int  # of the layer in the whole model; P and D agree on it
    kind: str  # "attention" | "state"
    segment: int  # state: 0..3 = conv Q, conv K, conv V, ssm; attention: 0
    offset: int  # bytes, of element [0, 0, ...] in the storage
    # attention: (block, token in block, head, plane, byte); state: (slot, channel, byte)
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes; last is 1
    first: int  # global number of head 0 / of channel 0 of this rank
    block_size: int  # attention: tokens per block; state: tokens between checkpoints or 0

    def __post_init__(self) -> None:
        axes = {"attention": 5, "state": 3}.get(self.kind)
        if axes is None or len(self.shape) != axes or len(self.strides) != axes or self.strides[-1] != 1:
            raise ValueError(
                f"{self.layer}: a region of kind {self.kind!r} cannot have shape {self.shape} "
                f"and strides {self.strides}"
            )
        shortest = 8 if self.kind == "attention" else 6
        if not shortest <= self.width <= 8 * LIMITS["lane"]:
            raise ValueError(
                f"{self.layer}: a row of {self.width} bytes cannot hold its address; "
                f"{shortest} to {8 * LIMITS['lane']} can"
            )
        heads = ("head", 256) if self.kind == "attention" else ("channel", 65536)
        if self.first < 0 or self.first + self.shape[-3 if self.kind == "attention" else 1] > heads[1]:
            raise ValueError(
                f"{self.layer}: {heads[0]}s {self.first} and up are beyond the {heads[1]} of a word"
            )
        if self.kind == "attention" and (self.shape[3] > 2 or self.shape[1] != self.block_size):
            raise ValueError(
                f"{self.layer}: shape {self.shape} has more than 2 planes "
                f"or not {self.block_size} tokens in a block"
            )
        in_range("layer", self.number)
        if not 0 <= self.segment < 4:
            raise ValueError(f"{self.layer}: segment {self.segment} is not one of 0 to 3")

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.shape[-1]

    @property
    def lanes(self) -> int:
        """Words of a row, the shorter last one included."""
        return -(-self.width // 8)

    def of(self, storage: Array) -> Array:
        """The region as a strided view of a 1-D array of bytes, uint8 (or bool for a mask).

        Raises ValueError if the region does not fit into the array.
        """
        return self._view(storage, storage.dtype, 1)

    def wide(self, storage: Array) -> Array:
        """The same view with the widest elements (1, 2, 4 or 8 bytes) that offset, strides and row allow.

        NumPy copies wide elements faster.
        """
        size = math.gcd(8, self.offset, self.width, *self.strides[:-1], storage.ctypes.data)
        return self._view(storage, np.dtype(f"u{size}"), size)

    def _view(self, storage: Array, dtype: np.dtype[Any], size: int) -> Array:
        shape, strides = (*self.shape[:-1], self.width // size), (*self.strides[:-1], size)
        try:
            return np.ndarray(shape, dtype, storage.data, self.offset, strides)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self.layer}: offset {self.offset}, shape {self.shape}, strides {self.strides} "
                f"leave {storage.nbytes} bytes"
            ) from error


def token_parts(tokens: Any, owners: Any) -> Array:
    """What tokens (positions) and their owners add to the words of every attention layer: uint64 [token].

    The same for all layers of a request, so callers compute it once and hand it to `token_rows`.
    """
    return part(FORMATS[ATTENTION, 8], token=tokens, owner=owners)


@functools.lru_cache(512)
def _columns(first: int, heads: int, planes: int, lanes: int) -> Array:
    """What heads, planes and lanes add to the words of every token, uint64 [head, plane, lane]."""
    form = FORMATS[ATTENTION, 8]
    head, plane = first + np.arange(heads)[:, None, None], np.arange(planes)[:, None]
    return part(form, head=head, plane=plane, lane=np.arange(lanes)) + magic_part(form)


def token_rows(region: Region, parts: Array, engine: int, rank: int) -> Array:
    """The rows of some tokens of an attention layer: uint8 [token, head, plane, byte].

    `parts` is `token_parts` of the tokens. The result is contiguous if the width is a multiple of 8.
    """
    form = FORMATS[ATTENTION, 8]
    _, _, heads, planes, width = region.shape
    token = parts + part(form, layer=region.number, engine=engine, rank=rank)
    words = np.add(token.reshape(-1, 1, 1, 1), _columns(region.first, heads, planes, region.lanes))
    fold(words, form)
    if width % 8:
        shorten(words[..., -1], width % 8)
    return words.view(np.uint8)[..., :width]


def write_tokens(
    storage: Array, region: Region, blocks: Any, tokens: Any, owners: Any, engine: int, rank: int
) -> None:
    """Write the row of tokens[i], of owners[i], into block blocks[i], slot tokens[i] % block size."""
    tokens = np.asarray(tokens, dtype=np.int64).reshape(-1)
    blocks, owners = np.broadcast_to(blocks, tokens.shape), np.broadcast_to(owners, tokens.shape)
    in_range("block", blocks, region.shape[0])
    view = region.wide(storage)
    step = max(1, _CHUNK // max(1, region.lanes * region.shape[2] * region.shape[3]))
    for at in range(0, len(tokens), step):
        some = slice(at, at + step)
        rows = token_rows(region, token_parts(tokens[some], owners[some]), engine, rank)
        view[blocks[some], tokens[some] % region.block_size] = _as(rows, view.dtype)


def _as(rows: Array, dtype: np.dtype[Any]) -> Array:
    return (rows if dtype.itemsize == 1 else np.ascontiguousarray(rows)).view(dtype)


@functools.lru_cache(64)
def _channels(first: int, channels: int, lanes: int, size: int) -> Array:
    """What channels and lanes add to the words of a state, of `size` bytes: uint64 [channel, lane]."""
    form = FORMATS[STATE, size]
    return part(form, head=first + np.arange(channels)[:, None]) + part(form, lane=np.arange(lanes))


def state_rows(region: Region, owner: int, tokens: int, engine: int) -> Array:
    """The rows of one segment of a state: uint8 [channel, byte]."""
    form = FORMATS[STATE, min(8, region.width)]
    common = part(
        form,
        layer=region.number,
        engine=engine,
        owner=owner,
        plane=region.segment,
        token=int(state_tokens(form, tokens)),
    )
    channels = _channels(region.first, region.shape[1], region.lanes, min(8, region.width))
    words = channels + (common + np.array(magic_part(form)))
    step = max(1, _CHUNK // region.lanes)
    for at in range(0, len(words), step):
        fold(words[at : at + step], form)
    if region.width > 8 and region.width % 8:
        shorten(words[..., -1], region.width % 8)
    return words.view(np.uint8)[..., : region.width]


def write_state(
    storage: Array, region: Region, slot: int, owner: int, tokens: int, engine: int, rank: int
) -> None:
    """Write the state after `tokens` tokens (1 to 16384) into a slot.

    `rank` is checked and not written: the global channels tell which rank it was.
    """
    in_range("rank", rank)
    in_range("slot", slot, region.shape[0])
    view = region.wide(storage)
    view[int(slot)] = _as(state_rows(region, owner, tokens, engine), view.dtype)
