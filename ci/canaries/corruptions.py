"""Corruptions of one request's KV, as a wrong connector could cause them: pure functions of a snapshot."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import msgspec
import numpy as np

from pytest_kvconform.rigs.engine.messages import Group, Snapshot

OLDER = 8  # tokens by which a stale state is behind


@dataclass(frozen=True)
class Source:
    """What P computed for one request, and what a wrong hand-over might take instead."""

    tokens: int  # that are handed over: all of the prompt but the last
    right: Snapshot
    older: Snapshot | None  # after OLDER tokens less; None: the model has no state
    other: Snapshot  # of another request
    random: Random  # chooses the block and the layer, of this request

    def layer(self, group: Group) -> str:
        """One layer of a group."""
        return self.random.choice(group.layers)

    def blocks(self, group: Group) -> list[int]:
        """The blocks of a group that D's next token sees."""
        return list(range(self.first(group) // group.block_size, (self.tokens - 1) // group.block_size + 1))

    def first(self, group: Group) -> int:
        """The first token of a group that D's next token sees."""
        return max(0, self.tokens + 1 - group.window) if group.window else 0


Corrupt = Callable[[Source, tuple[Group, ...]], Snapshot]


@dataclass(frozen=True)
class Corruption:
    """One kind of mistake. `every`: 1 if it hits all requests, 20 if it hits one in twenty; None: it hits the
    requests of one question.
    """

    name: str  # of a column
    kind: str  # of attention, that it hits; "": all, or the only kind that can be hit
    groups: tuple[Group, ...]  # of that kind, one of which is hit, or all
    corrupt: Corrupt
    every: int | None = 1

    def __call__(self, source: Source) -> Snapshot:
        return self.corrupt(source, self.groups)


RIGHT, ZEROED, SWAPPED = "right hand-over", "block of a layer zeroed", "two KV heads swapped"
STALE, FOREIGN = f"state {OLDER} tokens old", "state of another request"
SHORT, LOST = "window a block short", "window a token short"
CROSSED, WRONG, DRAFT = "1 in 20 crossed", "wrong block in 2 %", "block of the draft model zeroed"
SAME = "one question always crossed"
NAMES = (RIGHT, ZEROED, SWAPPED, STALE, FOREIGN, SHORT, LOST, CROSSED, SAME, WRONG, DRAFT)


def corruptions_of(snapshot: Snapshot, layers: int) -> Iterator[Corruption]:
    """Yield the corruptions that a model of these groups can suffer.

    `layers`: of the model. Those after them are of a draft model, whose KV changes no answer, but how many
    of its tokens are accepted.
    """
    of_model = [
        msgspec.structs.replace(group, layers=tuple(name for name in group.layers if _number(name) < layers))
        for group in snapshot.groups
    ]
    states = tuple(group for group in of_model if group.kind == "state")
    windows = tuple(group for group in of_model if group.kind == "attention" and group.window)
    full = tuple(group for group in of_model if group.kind == "attention" and not group.window)
    yield Corruption(RIGHT, "", snapshot.groups, lambda source, groups: source.right)
    for kind, groups in (("window", windows), ("full", full)):
        if groups:
            yield Corruption(ZEROED, kind, groups, zero_block)
            if snapshot.rows[groups[0].layers[0]].shape[1] > 1:
                yield Corruption(SWAPPED, kind, groups, swap_heads)
            yield Corruption(WRONG, kind, groups, wrong_block, 50)
    if windows:
        yield Corruption(SHORT, "", windows, short_window)
        yield Corruption(LOST, "", windows, lost_key)
    if states:
        yield Corruption(STALE, "", states, stale_state)
        yield Corruption(FOREIGN, "", states, other_state)
    if drafts := [name for group in snapshot.groups for name in group.layers if _number(name) >= layers]:
        of_draft = msgspec.structs.replace(snapshot.groups[0], layers=tuple(drafts))
        yield Corruption(DRAFT, "", (of_draft,), zero_block)
    yield Corruption(CROSSED, "", snapshot.groups, crossed, 20)
    yield Corruption(SAME, "", snapshot.groups, crossed, None)


def zero_block(source: Source, groups: tuple[Group, ...]) -> Snapshot:
    """One block of one layer that was never written."""
    group = source.random.choice(groups)
    block = source.random.choice(source.blocks(group))
    return _with_rows(source.right, {source.layer(group): (_tokens(group, block), None)})


def swap_heads(source: Source, groups: tuple[Group, ...]) -> Snapshot:
    """KV heads 0 and 1 of one layer, exchanged."""
    layer = source.layer(source.random.choice(groups))
    rows = source.right.rows[layer].copy()
    rows[:, [0, 1]] = rows[:, [1, 0]]
    return msgspec.structs.replace(source.right, rows={**source.right.rows, layer: rows})


def short_window(source: Source, groups: tuple[Group, ...]) -> Snapshot:
    """The first block of the window was never read, of all layers."""
    return _with_rows(
        source.right,
        {layer: (_tokens(g, source.blocks(g)[0]), None) for g in groups for layer in g.layers},
    )


def lost_key(source: Source, groups: tuple[Group, ...]) -> Snapshot:
    """The first token of the window was never read, of one layer."""
    group = source.random.choice(groups)
    first = source.first(group)
    return _with_rows(source.right, {source.layer(group): (slice(first, first + 1), None)})


def wrong_block(source: Source, groups: tuple[Group, ...]) -> Snapshot:
    """One block of one group with the KV of the block beside it."""
    group = source.random.choice(groups)
    block = source.random.choice(source.blocks(group))
    beside = _tokens(group, block - 1 if block else 1)
    return _with_rows(
        source.right,
        {layer: (_tokens(group, block), source.right.rows[layer][beside]) for layer in group.layers},
    )


def stale_state(source: Source, groups: tuple[Group, ...]) -> Snapshot:
    """The state of one layer as it was some tokens before."""
    assert source.older is not None
    return _with_state(source, groups, source.older)


def other_state(source: Source, groups: tuple[Group, ...]) -> Snapshot:
    """The state of one layer of another request."""
    return _with_state(source, groups, source.other)


def crossed(source: Source, groups: tuple[Group, ...]) -> Snapshot:
    """All KV and states of another request."""
    rows = {}
    for layer, right in source.right.rows.items():
        rows[layer] = np.zeros_like(right)
        other = source.other.rows[layer][: len(right)]
        rows[layer][: len(other)] = other
    return msgspec.structs.replace(source.right, rows=rows, state=source.other.state)


def _number(layer: str) -> int:
    """The place of a layer: 4 of "model.layers.4.self_attn.attn"."""
    return int(re.findall(r"\d+", layer)[0])


def _tokens(group: Group, block: int) -> slice:
    return slice(block * group.block_size, (block + 1) * group.block_size)


def _with_rows(right: Snapshot, changes: dict[str, tuple[slice, np.ndarray | None]]) -> Snapshot:
    """The snapshot with other rows at some tokens of some layers; None: zeros."""
    rows = dict(right.rows)
    for layer, (tokens, other) in changes.items():
        rows[layer] = rows[layer].copy()
        there = rows[layer][tokens]
        there[:] = 0 if other is None else other[: len(there)]
    return msgspec.structs.replace(right, rows=rows)


def _with_state(source: Source, groups: tuple[Group, ...], other: Snapshot) -> Snapshot:
    layer = source.layer(source.random.choice(groups))
    return msgspec.structs.replace(source.right, state={**source.right.state, layer: other.state[layer]})
