"""Where KV lies, and how it is written: regions of a storage, rows of tokens and of states, poison. NumPy only.

What the bytes say is in words.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_kvconform.kvspace.pools.words import (
    ATTENTION,
    COORDINATES,
    FOREIGN,
    FORMATS,
    LIMITS,
    POISON,
    STATE,
    Array,
    bits_of,
    decode,
    encode,
    fold,
    limit,
    mix,
    part,
    shorten,
    sign,
    spread,
    state_tokens,
)

__all__ = [
    "ATTENTION",
    "COORDINATES",
    "FOREIGN",
    "POISON",
    "STATE",
    "Array",
    "Region",
    "decode",
    "encode",
    "poison",
    "poison_bytes",
    "shares_of",
    "state_rows",
    "token_rows",
    "write_state",
    "write_tokens",
]

_CHUNK = 1 << 15  # words worked on at a time: fits the second level cache
_PAGE = 1 << 11  # words of poison that share all but the low bits of their place


@dataclass(frozen=True)
class Region:
    """Where the rows of one layer (attention) or of one segment of one layer (state) lie within a rank's storage."""

    layer: str  # full name
    number: int  # of the layer in the whole model; P and D agree on it
    kind: str  # "attention" | "state"
    segment: int  # state: 0..3 = conv Q, conv K, conv V, ssm; attention: 0
    offset: int  # bytes, of element [0, 0, ...] in the storage
    shape: tuple[
        int, ...
    ]  # attention: (block, token in block, head, plane, byte); state: (slot, channel, byte)
    strides: tuple[int, ...]  # bytes; last is 1
    first: int  # global number of head 0 / of channel 0 of this rank
    block_size: int  # attention: tokens per block; state: tokens between checkpoints or 0

    def __post_init__(self) -> None:
        axes = {"attention": 5, "state": 3}.get(self.kind)
        if axes is None or len(self.shape) != axes or len(self.strides) != axes or self.strides[-1] != 1:
            raise ValueError(
                f"{self.layer}: a region of kind {self.kind!r} cannot have shape {self.shape} and strides {self.strides}"
            )
        shortest = 8 if self.kind == "attention" else 6
        if not shortest <= self.width <= 8 * LIMITS["lane"]:
            raise ValueError(
                f"{self.layer}: a row of {self.width} bytes cannot hold its address; {shortest} to {8 * LIMITS['lane']} can"
            )
        heads = ("head", 256) if self.kind == "attention" else ("channel", 65536)
        if self.first < 0 or self.first + self.shape[-3 if self.kind == "attention" else 1] > heads[1]:
            raise ValueError(
                f"{self.layer}: {heads[0]}s {self.first} and up are beyond the {heads[1]} that a word can name"
            )
        if self.kind == "attention" and (self.shape[3] > 2 or self.shape[1] != self.block_size):
            raise ValueError(
                f"{self.layer}: shape {self.shape} has more than 2 planes or not {self.block_size} tokens in a block"
            )
        limit("layer", self.number)
        if not 0 <= self.segment < 4:
            raise ValueError(f"{self.layer}: segment {self.segment} is none of 0 to 3")

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.shape[-1]

    @property
    def lanes(self) -> int:
        """Words of a row, the shorter last one included."""
        return -(-self.width // 8)

    def of(self, storage: Array) -> Array:
        """The region as a strided view, uint8 (or bool for a mask), of a 1-D array of bytes. ValueError if it does not fit."""
        return self._view(storage, storage.dtype, 1)

    def wide(self, storage: Array) -> Array:
        """The same with elements as wide (1, 2, 4 or 8 bytes) as offset, strides and row allow. What NumPy copies fast."""
        size = math.gcd(8, self.offset, self.width, *self.strides[:-1], storage.ctypes.data)
        return self._view(storage, np.dtype(f"u{size}"), size)

    def _view(self, storage: Array, dtype: np.dtype[Any], size: int) -> Array:
        shape, strides = (*self.shape[:-1], self.width // size), (*self.strides[:-1], size)
        try:
            return np.ndarray(shape, dtype, storage.data, self.offset, strides)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self.layer}: offset {self.offset}, shape {self.shape}, strides {self.strides} leave {storage.nbytes} bytes"
            ) from error


def shares_of(tokens: Any, owners: Any) -> Array:
    """What tokens (positions) and owners add to the words of every attention layer: uint64 [token]."""
    return part(FORMATS[ATTENTION, 8], token=tokens, owner=owners)


@functools.lru_cache(512)
def _columns(first: int, heads: int, planes: int, lanes: int) -> Array:
    """What heads, planes and lanes add to the words of every token, uint64 [head, plane, lane]."""
    form = FORMATS[ATTENTION, 8]
    head, plane = first + np.arange(heads)[:, None, None], np.arange(planes)[:, None]
    return part(form, head=head, plane=plane, lane=np.arange(lanes)) + sign(form)


def token_rows(region: Region, shares: Array, engine: int, rank: int) -> Array:
    """The rows of some tokens of an attention layer: uint8 [token, head, plane, byte], contiguous if the width is a multiple of 8.

    `shares` is `shares_of` tokens and owners.
    """
    form = FORMATS[ATTENTION, 8]
    _, _, heads, planes, width = region.shape
    token = shares + part(form, layer=region.number, engine=engine, rank=rank)
    words = np.add(token.reshape(-1, 1, 1, 1), _columns(region.first, heads, planes, region.lanes))
    fold(words, form)
    if width % 8:
        shorten(words[..., -1], width % 8)
    return words.view(np.uint8)[..., :width]


def write_tokens(
    storage: Array, region: Region, blocks: Any, tokens: Any, owners: Any, engine: int, rank: int
) -> None:
    """Write the KV of tokens: the row of tokens[i], which owners[i] computed, goes to block blocks[i], slot tokens[i] % block size."""
    tokens = np.asarray(tokens, dtype=np.int64).reshape(-1)
    blocks, owners = np.broadcast_to(blocks, tokens.shape), np.broadcast_to(owners, tokens.shape)
    limit("block", blocks, region.shape[0])
    view = region.wide(storage)
    step = max(1, _CHUNK // max(1, region.lanes * region.shape[2] * region.shape[3]))
    for at in range(0, len(tokens), step):
        some = slice(at, at + step)
        rows = token_rows(region, shares_of(tokens[some], owners[some]), engine, rank)
        view[blocks[some], tokens[some] % region.block_size] = _as(rows, view.dtype)


def _as(rows: Array, dtype: np.dtype[Any]) -> Array:
    return (rows if dtype.itemsize == 1 else np.ascontiguousarray(rows)).view(dtype)


@functools.lru_cache(64)
def _channels(first: int, channels: int, lanes: int, size: int) -> Array:
    """What channels and lanes add to the words of a state, uint64 [channel, lane]; `size`: bytes of a word."""
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
    words = _channels(region.first, region.shape[1], region.lanes, min(8, region.width)) + (
        common + np.array(sign(form))
    )
    step = max(1, _CHUNK // region.lanes)
    for at in range(0, len(words), step):
        fold(words[at : at + step], form)
    if region.width > 8 and region.width % 8:
        shorten(words[..., -1], region.width % 8)
    return words.view(np.uint8)[..., : region.width]


def write_state(
    storage: Array, region: Region, slot: int, owner: int, tokens: int, engine: int, rank: int
) -> None:
    """Write the state after `tokens` tokens (1 to 16384) to a slot. `rank` is checked and not written: the channels tell it."""
    limit("rank", rank)
    limit("slot", slot, region.shape[0])
    view = region.wide(storage)
    view[int(slot)] = _as(state_rows(region, owner, tokens, engine), view.dtype)


def poison_bytes(start: int, end: int, engine: int, rank: int) -> Array:
    """The poison of bytes [start, end) of a storage, uint8."""
    pages = range(start // 8 // _PAGE, -(-end // 8 // _PAGE))
    words = _of_pages(pages, engine, rank) ^ _of_places()
    return words.view(np.uint8).reshape(-1)[start - 8 * _PAGE * pages.start :][: end - start]


@functools.lru_cache(1 << 14)
def _of_pages(pages: range, engine: int, rank: int) -> Array:
    """What words of poison have in common in each of some pages: uint64 [page, 1]."""
    form = FORMATS[POISON, 8]
    limit("offset", [8 * _PAGE * pages.start, 8 * _PAGE * pages.stop - 8], 8 << 38)
    common = np.arange(pages.start, pages.stop, dtype=np.uint64) * np.uint64(_PAGE)
    common |= np.uint64(bits_of(form, engine=engine, rank=rank) | form.top)
    return spread(mix(common))[:, None]


@functools.cache
def _of_places() -> Array:
    """What the place within a page changes in them: uint64 [word]."""
    return spread(mix(np.arange(_PAGE, dtype=np.uint64))) ^ np.uint64(0x8080808080808080)


def poison(
    storage: Array, engine: int, rank: int, regions: Iterable[Region] = (), blocks: Any = None
) -> None:
    """Poison the whole storage (padding included), or only the rows of `blocks` (slots) of `regions`: each word says where it stands."""
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
        low = sum((n - 1) * s for n, s in zip(region.shape[1:], region.strides[1:], strict=True) if s < 0)
        high = (
            sum((n - 1) * s for n, s in zip(region.shape[1:], region.strides[1:], strict=True) if s > 0) + 1
        )
        for block in limit("block", blocks, region.shape[0]).reshape(-1).tolist():
            start = region.offset + block * region.strides[0] + low
            fill = poison_bytes(start, start + high - low, engine, rank)
            fill = np.ascontiguousarray(fill)
            view[block] = np.ndarray(region.shape[1:], np.uint8, fill.data, -low, region.strides[1:])
