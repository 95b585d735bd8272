"""Pools of random geometry, filled as an engine of the byte rig fills them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from pytest_kvconform.kvspace.pools.addresses import Array
from pytest_kvconform.kvspace.pools.poison import poison
from pytest_kvconform.kvspace.pools.regions import Region, write_state, write_tokens

PAGE_BYTES_AT_MOST = 1 << 15


@dataclass
class Pool:
    """One rank's storage and what it should hold. `held` is layer -> blocks, in the order of the request."""

    storage: Array = field(repr=False)
    shadow: Array = field(repr=False)
    regions: tuple[Region, ...]
    page: int  # bytes
    tokens: int
    engine: int = 1
    held: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def poison(self) -> None:
        for memory in (self.storage, self.shadow):
            poison(memory, self.engine)

    def fill(self, memory: Array, engine: int = 0, owner: int = 3) -> None:
        """What the first `tokens` tokens leave, as `engine` computed it, into the blocks that are held."""
        positions = np.arange(self.tokens)
        for region in self.regions:
            blocks = np.array(self.held[region.layer])
            if region.kind == "attention":
                write_tokens(
                    memory, region, blocks[positions // region.block_size], positions, owner, engine, 0
                )
            else:
                write_state(memory, region, int(blocks[0]), owner, self.tokens, engine, 0)

    def accept_rows_not_due(self) -> Pool:
        """Copy the rows of held blocks that are not due from the storage into the shadow."""
        wanted = np.zeros(len(self.storage), dtype=np.uint8)
        self.fill(wanted)
        for region in self.regions:
            blocks = list(self.held[region.layer])
            free = ~region.of(wanted)[blocks].any(axis=-1)
            rows = region.of(self.shadow)[blocks]
            rows[free] = region.of(self.storage)[blocks][free]
            region.of(self.shadow)[blocks] = rows
        return self

    def start(self, held: dict[str, tuple[int, ...]]) -> Pool:
        """Poisoned; the shadow holds what is due, the storage does not yet."""
        self.held = held
        self.poison()
        self.fill(self.shadow)
        return self


def attention(
    name: str,
    number: int,
    order: str,
    offset: int,
    step: int,
    blocks: int,
    n: int,
    heads: int,
    planes: int,
    width: int,
    first: int = 0,
) -> Region:
    """`order`: the axes of a page, outermost first: n tokens, h heads, p planes. "hnp" is HND, packed."""
    sizes, strides, stride = {"n": n, "h": heads, "p": planes}, {}, width
    for axis in reversed(order):
        strides[axis], stride = stride, stride * sizes[axis]
    return Region(
        name,
        number,
        "attention",
        0,
        offset,
        (blocks, n, heads, planes, width),
        (step, strides["n"], strides["h"], strides["p"], 1),
        first,
        n,
    )


def state(
    name: str,
    number: int,
    offset: int,
    step: int,
    slots: int,
    channels: tuple[int, ...],
    widths: tuple[int, ...],
    rank: int = 0,
):
    """Four segments, one behind the other, of one layer."""
    regions = []
    for segment, (count, width) in enumerate(zip(channels, widths, strict=True)):
        regions.append(
            Region(
                name,
                number,
                "state",
                segment,
                offset,
                (slots, count, width),
                (step, width, 1),
                rank * count,
                0,
            )
        )
        offset += count * width
    return regions


def shuffled(seed: int, count: int, blocks: int) -> list[int]:
    """Some block ids, never the null block."""
    return (1 + np.random.default_rng(seed).permutation(blocks - 1)[:count]).tolist()


@st.composite
def pools(draw: st.DrawFn, groups: int | None = None, with_state: bool | None = None) -> Pool:
    """LBHNC, LBNHC or BLHNC, K and V packed or split, groups that share memory, odd widths, padding."""
    layout = draw(st.sampled_from(["LB-hnp", "LB-nhp", "LB-hpn", "LB-pnh", "BL-hnp", "BL-nhp"]))
    planes = draw(st.sampled_from([1, 2]))
    width = draw(
        st.sampled_from([1152, 2304]) if planes == 1 else st.sampled_from([8, 16, 17, 20, 64, 70, 128, 256])
    )
    heads = 1 if planes == 1 else draw(st.integers(1, 4))
    n = draw(st.sampled_from([1, 3, 4, 8]))
    layers, blocks = draw(st.integers(1, 3)), draw(st.integers(8, 12))
    groups = draw(st.integers(1, 3)) if groups is None else groups
    with_state = draw(st.booleans()) if with_state is None else with_state
    conv = draw(st.sampled_from([6, 7, 8, 12, 24]))
    channels, widths = (
        (draw(st.integers(1, 8)), draw(st.integers(1, 8)), draw(st.integers(1, 8)), 4),
        (conv, conv, conv, 64),
    )
    page = max(
        n * heads * planes * width,
        sum(c * w for c, w in zip(channels, widths, strict=True)) if with_state else 0,
    )
    page += draw(st.sampled_from([0, 2, 8]))
    regions: list[Region] = []
    kinds = ["attention"] * groups + ["state"] * with_state
    for group, kind in enumerate(kinds):
        for place in range(layers):
            number = group * layers + place
            offset = place * page * (blocks if layout.startswith("LB") else 1)
            step = page * (1 if layout.startswith("LB") else layers)
            if kind == "attention":
                regions.append(
                    attention(
                        f"layers.{number}", number, layout[3:], offset, step, blocks, n, heads, planes, width
                    )
                )
            else:
                regions += state(f"layers.{number}", number, offset, step, blocks, channels, widths)
    storage = np.zeros(page * blocks * layers, dtype=np.uint8)
    each = (blocks - 2) // len(kinds)
    tokens = draw(st.integers(1, each * n))
    ids = shuffled(draw(st.integers(0, 99)), each * len(kinds), blocks)
    held = {}
    for group, kind in enumerate(kinds):
        count = -(-tokens // n) if kind == "attention" else 1
        for place in range(layers):
            held[f"layers.{group * layers + place}"] = tuple(ids[group * each :][:count])
    return Pool(storage, storage.copy(), tuple(regions), page, tokens).start(held)
