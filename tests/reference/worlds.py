"""Two engines made of NumPy arrays with vLLM's memory layouts, and a hand-over cell by cell.

Nothing here adds up an address: memory is viewed by reshaping and transposing, and the boxes take strides and
addresses from the views.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from reference_connector.boxes import Axis, Box
from reference_connector.plan import Table

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
TAPS, CONV = 3, 2  # of a convolution: taps, bytes of an element


@dataclass(frozen=True)
class Kind:
    """Layers that are shaped alike."""

    name: str
    layers: tuple[str, ...]
    heads: int = 1  # of the model
    width: int = 4  # bytes of a cell
    replicated: bool = False  # MLA: every rank holds everything
    state: bool = False  # conv Q, K of `heads` channels each, V of twice as many, ssm of `heads` heads

    def range(self, tp: int, rank: int) -> tuple[int, int]:
        if self.replicated:
            return 0, self.heads
        if self.heads >= tp:
            return rank * self.heads // tp, (rank + 1) * self.heads // tp
        return rank * self.heads // tp, rank * self.heads // tp + 1


@dataclass(frozen=True)
class Setup:
    """How one engine keeps its KV. Groups share memory from byte 0 on; P and D may order them differently."""

    tp: int
    groups: tuple[tuple[Kind, ...], ...]
    layout: str
    block: int  # tokens
    pieces: int
    num_blocks: int
    conv: str  # DS or SD


def page(kind: Kind, setup: Setup) -> int:
    """Bytes of one layer and block on a rank. A state is padded by 5 bytes."""
    start, stop = kind.range(setup.tp, 0)
    if kind.state:
        return (stop - start) * (4 * TAPS * CONV + kind.width) + 5
    return (stop - start) * setup.block * kind.width


def widest(setup: Setup) -> int:
    return max(page(kind, setup) for group in setup.groups for kind in group)


class Engine:
    """Memory of all ranks. parts[rank][layer, part]: range, view [kernel block, token, ..., byte]."""

    def __init__(self, setup: Setup, seed: int):
        self.setup, self.parts, self.boxes = setup, [], []
        rng = np.random.default_rng(seed)
        row = max(sum(page(kind, setup) * len(kind.layers) for kind in group) for group in setup.groups)
        room = max(sum(page(kind, setup) for kind in group for _ in kind.layers) for group in setup.groups)
        if len(setup.groups) > 1:
            room = max(len(group[0].layers) for group in setup.groups) * widest(setup)
        self.memory = [
            rng.integers(0, 256, setup.num_blocks * max(row, room) + 64, np.uint8) for _ in range(setup.tp)
        ]
        for rank in range(setup.tp):
            self.parts.append({})
            self.boxes.append([])
            for index, group in enumerate(setup.groups):
                self._lay_out(rank, index, group, row)

    def _lay_out(self, rank: int, index: int, group: tuple[Kind, ...], row: int) -> None:
        """Layers of a group follow each other, kind by kind. Pages are padded to one size."""
        setup, at = self.setup, 0
        for kind in group:
            first, last = kind.range(setup.tp, rank)
            own = page(kind, setup)
            padded = widest(setup) if len(setup.groups) > 1 else own
            size = {
                "L": len(kind.layers),
                "B": setup.num_blocks,
                "H": last - first,
                "N": setup.block,
                "C": kind.width,
            }
            if kind.state:
                size |= {"H": 1, "N": 1, "C": own}
            order = setup.layout
            if order[0] == "B":
                flat = self.memory[rank][: row * setup.num_blocks].reshape(setup.num_blocks, row)[
                    :, at : at + own * size["L"]
                ]
                at += own * size["L"]
            else:
                flat = self.memory[rank][at : at + padded * size["L"] * setup.num_blocks]
                at += len(flat)
                if padded > own:
                    flat = flat.reshape(size["L"], setup.num_blocks, padded)[:, :, :own]
                    order = "LB" + order.replace("L", "").replace("B", "")
                elif not kind.state:
                    size |= {"B": setup.num_blocks * setup.pieces, "N": setup.block // setup.pieces}
            view = flat.reshape([size[letter] for letter in order]).transpose(
                [order.index(letter) for letter in "LBHNC"]
            )
            for number, layer in enumerate(kind.layers):
                self._describe(rank, index, kind, layer, view[number].transpose(0, 2, 1, 3), first, last)

    def _describe(
        self, rank: int, index: int, kind: Kind, layer: str, view: Any, first: int, last: int
    ) -> None:
        setup = self.setup
        if not kind.state:
            self._add(rank, index, layer, "kv", view, [("head", first, last, kind.heads)])
            return
        page, channels, at = view[:, 0, 0, :], last - first, 0
        end = 4 * channels * TAPS * CONV
        conv = page[:, :end]
        if setup.conv == "DS":
            conv = conv.reshape(-1, 4 * channels, TAPS, CONV)
        else:
            conv = conv.reshape(-1, TAPS, 4 * channels, CONV).transpose(0, 2, 1, 3)
        for part, times in (("conv.q", 1), ("conv.k", 1), ("conv.v", 2)):
            axes = [("channel", times * first, times * last, times * kind.heads), ("tap", 0, TAPS, TAPS)]
            self._add(rank, index, layer, part, conv[:, None, at : at + times * channels], axes)
            at += times * channels
        ssm = page[:, end : end + channels * kind.width].reshape(-1, 1, channels, kind.width)
        self._add(rank, index, layer, "ssm", ssm, [("head", first, last, kind.heads)])

    def _add(
        self, rank: int, index: int, layer: str, part: str, view: Any, axes: list[tuple[str, int, int, int]]
    ) -> None:
        self.parts[rank][layer, part] = tuple((start, stop) for _, start, stop, _ in axes), view
        block, token, *inner, byte = view.strides
        assert byte == 1 and np.shares_memory(view, self.memory[rank])
        made = tuple(Axis(*axis, stride) for axis, stride in zip(axes, inner, strict=True))
        pieces = view.shape[0] // self.setup.num_blocks
        address = view.__array_interface__["data"][0]
        self.boxes[rank].append(
            Box(
                layer,
                part,
                "bytes",
                index,
                address,
                view.shape[0],
                block,
                pieces,
                view.shape[1],
                1,
                token,
                made,
                view.shape[-1],
            ),
        )

    def cells(self, rank: int, layer: str, part: str, blocks: Any, first: int, token: int) -> Any:
        """[coordinates..., byte] of one token, a view."""
        view = self.parts[rank][layer, part][1]
        size = view.shape[1]
        pieces = view.shape[0] // self.setup.num_blocks
        entry, within = divmod(token - first, size * pieces)
        return view[int(blocks[entry]) * pieces + within // size, within % size]


def offsets(addresses: np.ndarray, lengths: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Offsets of addresses in an array; the pieces must lie in the array."""
    found = addresses - memory.__array_interface__["data"][0]
    assert (lengths > 0).all() and (found >= 0).all() and (found + lengths <= len(memory)).all(), (
        "outside of the memory"
    )
    return found


def naive(d: Engine, rank: int, p: Engine, spans: Any, local: Any, remote: Any) -> None:
    """Copy cell by cell into the memory of one rank of D, after making replicated cells of P equal."""
    group_of = {
        kind: {layer: i for i, g in enumerate(e.setup.groups) for k in g for layer in k.layers}
        for kind, e in (("D", d), ("P", p))
    }
    for (layer, part), (ranges, _) in d.parts[rank].items():
        mine, theirs = group_of["D"][layer], group_of["P"][layer]
        for token in range(*spans[mine]):
            into = d.cells(rank, layer, part, local[mine].blocks, local[mine].first, token)
            values: dict[tuple[int, ...], Any] = {}
            for number in range(p.setup.tp):
                come = p.parts[number][layer, part][0]
                cells = p.cells(number, layer, part, remote[theirs].blocks, remote[theirs].first, token)
                for at in product(*map(range, cells.shape[:-1])):
                    where = tuple(a + start for a, (start, _) in zip(at, come, strict=True))
                    cells[at] = values.setdefault(where, cells[at].copy())
            for at in product(*map(range, into.shape[:-1])):
                into[at] = values[tuple(a + start for a, (start, _) in zip(at, ranges, strict=True))]


# ---- what may be drawn


@st.composite
def families(draw: Any) -> tuple[tuple[Kind, ...], ...]:
    """Groups of kinds of layers."""
    heads, width = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([2, 6, 8]))
    gqa = Kind("gqa", ("a.0", "a.1", "a.2")[: draw(st.integers(1, 3))], heads, width)
    window = Kind("window", ("w.0", "w.1"), heads, width)
    mla = Kind("mla", ("m.0", "m.1", "m.2"), 1, draw(st.sampled_from([4, 12])), replicated=True)
    state = Kind("state", ("s.0", "s.1"), 8, draw(st.sampled_from([4, 16])), state=True)
    one_group = [((gqa,),), ((mla,),), ((mla, gqa),), ((gqa, mla),)]
    return draw(st.sampled_from([*one_group, ((gqa,), (window,)), ((gqa,), (state,)), ((mla,), (state,))]))


@st.composite
def setups(draw: Any, groups: tuple[tuple[Kind, ...], ...]) -> Setup:
    layout = draw(st.sampled_from(LAYOUTS))
    block = draw(st.sampled_from([2, 3, 4, 6, 8, 12]))
    pieces = draw(st.sampled_from([n for n in (1, 2, 3) if block % n == 0])) if layout[0] == "L" else 1
    setup = Setup(
        tp=draw(st.sampled_from([1, 2, 4, 8])),
        groups=groups[::-1] if draw(st.booleans()) else groups,
        layout=layout,
        block=block,
        pieces=pieces,
        num_blocks=draw(st.integers(34, 40)),
        conv=draw(st.sampled_from(["DS", "SD"])),
    )
    # what vLLM can do with padded pages
    if any(kind.state for group in groups for kind in group) and layout[0] == "L":
        pads = any(page(group[0], setup) < widest(setup) and not group[0].state for group in groups)
        setup = replace(setup, layout="LBHNC" if layout == "LHBNC" else layout, pieces=1 if pads else pieces)
    return setup


@st.composite
def tables(draw: Any, setup: Setup, spans: dict[str, tuple[int, int]]) -> list[Table]:
    """Block tables that cover `spans` (by the first kind of a group); ids ascend, descend or are shuffled."""
    made, ids = [], list(range(1, setup.num_blocks))
    order = draw(st.sampled_from(["up", "down", "shuffled"]))
    if order == "shuffled":
        ids = np.random.default_rng(draw(st.integers(0, 99))).permutation(ids).tolist()
    for group in setup.groups:
        start, stop = spans[group[0].name]
        if group[0].state:
            made.append(Table([ids.pop(0)]) if start < stop else Table([]))
            continue
        first = draw(st.integers(0, start // setup.block)) * setup.block
        if draw(st.booleans()):
            # vLLM begins at a block's first token; a plan does not depend on it
            first = draw(st.integers(-2, start))
        many = -(-(stop - first) // setup.block) + draw(st.integers(0, 1))
        own, ids = ids[:many], ids[many:]
        made.append(Table(own[::-1] if order == "down" else own, first))
    return made


@dataclass(frozen=True)
class World:
    p: Setup
    d: Setup
    spans: list[tuple[int, int]]  # by group of D
    local: list[Table]
    remote: list[Table]
    seed: int


@st.composite
def worlds(draw: Any) -> World:
    """A hand-over of at most 24 tokens. Spans begin anywhere, as after a prefix hit or with a window."""
    groups = draw(families())
    d = draw(setups(groups))
    groups = tuple(
        tuple(replace(kind, layers=tuple(draw(st.permutations(kind.layers)))) for kind in group)
        for group in groups
    )
    # only P has a draft
    more = (
        ((*groups[0], Kind("draft", ("x.0",), 2, 4)),) if len(groups) == 1 and draw(st.booleans()) else groups
    )
    p = draw(setups(more))
    stop = draw(st.integers(1, 24))
    spans = {}
    for group in groups:
        wanted = (0, 1) if group[0].state else (draw(st.integers(0, stop - 1)), stop)
        spans[group[0].name] = wanted if draw(st.integers(0, 5)) else (0, 0)
    local, remote = draw(tables(d, spans)), draw(tables(p, spans))
    return World(p, d, [spans[group[0].name] for group in d.groups], local, remote, draw(st.integers(0, 99)))
