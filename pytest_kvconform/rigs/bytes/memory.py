"""The KV memory of one rank: `storage`, its expected content `shadow`, and the place of every row.

vLLM allocated `storage`.

Blocks are vLLM's logical blocks. `pages` are all bytes that belong to a block id, padding and the slots of
layers that its group does not have included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from model_matrix.geometries import Geometry, Mla, State, expand_layers
from pytest_kvconform.kvspace.pools.addresses import Array
from pytest_kvconform.kvspace.pools.poison import poison, poison_bytes
from pytest_kvconform.kvspace.pools.regions import Region, state_rows, token_rows
from pytest_kvconform.rigs.bytes import pool_memory
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import kv_heads, state_segments

# backends that keep [K of all tokens; V of all tokens] per (block, head); the rest: [K | V] per token
SPLIT = frozenset({"CPU_ATTN"})
_WORDS = 1 << 15  # worked on at a time: fits the second level cache


def regions_of(
    geometry: Geometry,
    caches: dict[str, Any],
    backends: dict[str, str],
    num_blocks: int,
    tp: int,
    rank: int,
    conv: str,
) -> Any:
    """The rows of every layer, from the tensors that vLLM allocated: layer name -> tuple of Region.

    `caches` are vLLM's views [block, head, token, content] of one allocation, `backends` the names of the
    attention backends, `conv` is the layout of convolution states. Raises ValueError for a backend that
    cannot work in a layout.
    """
    found: dict[str, tuple[Region, ...]] = {}
    for layer in expand_layers(geometry):
        cache, size = caches[layer.name], caches[layer.name].element_size()
        offset = cache.data_ptr() - cache.untyped_storage().data_ptr()
        block, head, token, _ = (stride * size for stride in cache.stride())
        if isinstance(layer.kind, State):
            found[layer.name] = tuple(
                _state_regions(geometry, layer, offset, block, num_blocks, tp, rank, conv)
            )
            continue
        blocks, heads, tokens, content = tuple(cache.shape)
        content *= size
        planes = 1 if isinstance(layer.kind, Mla) else 2
        width = content // planes
        if backends[layer.name] in SPLIT:
            if token != content:
                raise ValueError(
                    f"{backends[layer.name]} keeps all K of a block before all V, "
                    "and this layout has heads between tokens"
                )
            strides = (block, width, head, tokens * width, 1)
        else:
            strides = (block, token, head, width, 1)
            # kernel blocks that follow one another: one logical block
            if blocks > num_blocks and block == tokens * token:
                ratio = blocks // num_blocks
                blocks, tokens, strides = num_blocks, tokens * ratio, (block * ratio, *strides[1:])
        shape, first = (blocks, tokens, heads, planes, width), kv_heads(layer.kind, tp, rank)[0]
        found[layer.name] = (
            Region(layer.name, layer.number, "attention", 0, offset, shape, strides, first, tokens),
        )
    return found


def _state_regions(
    geometry: Geometry, layer: Any, offset: int, page: int, slots: int, tp: int, rank: int, conv: str
) -> list[Region]:
    """DS: a row is a channel.

    SD: the channels of a head lie side by side for each token, so a row is a head and token * heads + head
    its number.
    """
    regions = []
    for segment in state_segments(geometry, layer.kind, tp, "SD" if conv == "SD" else "DS"):
        common = (layer.name, layer.number, "state", segment.number)
        if segment.element_stride == segment.element_size:
            shape = (slots, segment.rows, segment.elements * segment.element_size)
            regions.append(
                Region(
                    *common,
                    offset + segment.offset,
                    shape,
                    (page, segment.row_stride, 1),
                    segment.first(rank),
                    0,
                ),
            )
            continue
        channels = layer.kind.head_v if segment.number == 2 else layer.kind.head_k
        heads, width = segment.rows // channels, channels * segment.element_size
        for token in range(segment.elements):
            at = offset + segment.offset + token * segment.element_stride
            regions.append(
                Region(
                    *common, at, (slots, heads, width), (page, width, 1), token * heads * tp + rank * heads, 0
                )
            )
    return regions


def _poisoned(size: int, engine: int) -> Array:
    return np.frombuffer(pool_memory.poison(size, engine), dtype=np.uint8)


class Memory:
    """Storage and shadow. What the stand-in for the model writes goes to both."""

    frozen = False  # whether `storage` is a copy of what it held at some moment
    used: Array | None = None  # blocks that are compared; None: all
    spans: tuple[tuple[int, int], ...] = ()  # where their bytes lie, [start, end); none: all are compared

    def __init__(
        self,
        caches: dict[str, Any],
        num_blocks: int,
        regions: dict[str, tuple[Region, ...]],
        engine: int,
        rank: int,
        poisoned: bool,  # whether the storage on CPU is poison, see `pool_memory.pools_of`
    ):
        import torch

        self.num_blocks, self.regions, self.engine, self.rank = num_blocks, regions, engine, rank
        whole = next(iter(caches.values())).untyped_storage()
        self.device = torch.empty(0, dtype=torch.uint8, device=whole.device).set_(
            whole, 0, (whole.nbytes(),), (1,)
        )
        self.storage: Array = np.empty(0, dtype=np.uint8) if self.device.is_cuda else self.device.numpy()
        self.pages = _pages(caches, num_blocks)
        self.dirty = np.zeros(num_blocks, dtype=bool)  # blocks that may not be all poison
        self.shadow = _poisoned(whole.nbytes(), engine)
        if self.device.is_cuda:
            self.storage = _poisoned(whole.nbytes(), engine)
            self.device.copy_(torch.from_numpy(self.storage))
        elif not poisoned:
            poison(self.storage, engine)

    # On a GPU `storage` is a copy in host memory: these two bring blocks there and back, all in one copy,
    # since each waits for the GPU, which other engines use. On CPU it is the memory itself.

    @property
    def copied(self) -> bool:
        """Whether `storage` is a copy, since the memory is that of a GPU."""
        return bool(self.device.is_cuda)

    def fetch(self, blocks: Array | None = None) -> None:
        """Bring what these blocks (default: all that are compared) hold now into `storage`."""
        if not self.copied or self.frozen:
            return
        blocks = self.used if blocks is None else blocks
        if blocks is None:
            self.storage[:] = self.device.cpu().numpy()
        elif spans := self._spans(blocks):
            import torch

            at, found = 0, torch.cat([self.device[start:end] for start, end in spans]).cpu().numpy()
            for start, end in spans:
                self.storage[start:end] = found[at : (at := at + end - start)]

    def flush(self, blocks: Array) -> None:
        """Copy what was written to `storage` to the device: whole blocks.

        No transfer may be writing into these blocks.
        """
        if self.copied and (spans := self._spans(blocks)):
            import torch

            new = torch.from_numpy(np.concatenate([self.storage[start:end] for start, end in spans]))
            parts = new.to(self.device.device).split([end - start for start, end in spans])
            for part, (start, end) in zip(parts, spans, strict=True):
                self.device[start:end].copy_(part)
            self.device[:1].cpu()  # waits until all have been copied

    @contextlib.contextmanager
    def held_before(self, storage: Array) -> Iterator[None]:
        """Take these bytes for the storage: what it held at an earlier moment."""
        now, self.storage, self.frozen = self.storage, storage, True
        try:
            yield
        finally:
            self.storage, self.frozen = now, False

    def _spans(self, blocks: Array | None) -> list[tuple[int, int]]:
        if blocks is None:
            return []
        ids = np.unique(blocks).tolist()
        return [
            (base + b * stride, base + b * stride + size) for base, size, stride in self.pages for b in ids
        ]

    def leave_out(self, first: int) -> None:
        """Compare no block up to this one. They may be gigabytes, which no engine uses."""
        count = self.num_blocks - first - 1
        self.used = np.arange(first + 1, self.num_blocks)
        self.spans = tuple(
            (base + (first + 1) * stride, base + (first + count) * stride + size)
            for base, size, stride in self.pages
        )

    def page_views(self, of: Array) -> list[Array]:
        """All bytes of every block: views [block, byte]."""
        return [
            np.ndarray((self.num_blocks, size), np.uint8, of.data, base, (stride, 1))
            for base, size, stride in self.pages
        ]

    def accept(self, blocks: Array) -> None:
        """Take over into the shadow what these blocks hold."""
        if len(blocks):
            self.dirty[blocks] = True
            for mine, should in zip(self.page_views(self.storage), self.page_views(self.shadow), strict=True):
                should[blocks] = mine[blocks]

    def still_as_accepted(self, blocks: Array) -> bool:
        """Whether these blocks still hold what the shadow took over from them."""
        return all(
            np.array_equal(mine[blocks], should[blocks])
            for mine, should in zip(self.page_views(self.storage), self.page_views(self.shadow), strict=True)
        )

    def accept_all(self) -> None:
        """Take over into the shadow all that is compared."""
        if self.used is not None:
            self.accept(self.used)
        else:
            self.dirty[:] = True
            self.shadow[:] = self.storage

    def poison(self, blocks: Array) -> None:
        """Fill these blocks with poison, as before the first write."""
        blocks = blocks[self.dirty[blocks]]
        self.dirty[blocks] = False
        for start, end in self._spans(blocks):
            for at in range(start, end, 8 * _WORDS):
                some = slice(at, min(at + 8 * _WORDS, end))
                self.storage[some] = self.shadow[some] = poison_bytes(some.start, some.stop, self.engine)
        self.flush(blocks)

    def zero(self, blocks: Array) -> None:
        self.dirty[blocks] = True
        for of in (self.storage, self.shadow):
            for page in self.page_views(of):
                page[blocks] = 0
        self.flush(blocks)

    def copy(self, source: Array, target: Array) -> None:
        """Copy whole blocks, as a prefix cache hit that ends within a block makes vLLM do."""
        self.fetch(source)
        self.dirty[target] = True
        for of in (self.storage, self.shadow):
            for page in self.page_views(of):
                page[target] = page[source]
        self.flush(target)

    def write_tokens(
        self,
        to: tuple[Array, ...],
        region: Region,
        blocks: Array,
        tokens: Array,
        shares: Array,
        engine: int,
        rank: int,
    ) -> None:
        """Write the rows of `tokens` (positions) into logical `blocks` of each array of `to`.

        `shares`: `token_parts`.
        """
        size = region.block_size
        self.dirty[blocks] = True
        if region.shape[0] > self.num_blocks:  # the region counts kernel blocks
            ratio = region.shape[0] // self.num_blocks
            blocks = blocks * ratio + tokens % (size * ratio) // size
        views = [region.wide(of) for of in to]
        width = views[0].dtype
        step = max(1, _WORDS // (region.lanes * region.shape[2] * region.shape[3]))
        for at in range(0, len(tokens), step):
            some = slice(at, at + step)
            rows = np.ascontiguousarray(token_rows(region, shares[some], engine, rank)).view(width)
            for view in views:
                view[blocks[some], tokens[some] % size] = rows

    def write_state(
        self, to: tuple[Array, ...], region: Region, slot: int, owner: int, tokens: int, engine: int
    ) -> None:
        """Write the rows of the state after `tokens` tokens into a slot of each array of `to`."""
        self.dirty[slot] = True
        views = [region.wide(of) for of in to]
        rows = np.ascontiguousarray(state_rows(region, owner, tokens, engine)).view(views[0].dtype)
        for view in views:
            view[slot] = rows

    def held(self, layers: dict[str, int], groups: Array, first: dict[int, Array]) -> dict[str, Array]:
        """Layer -> the blocks of its regions whose content is its group's.

        `layers`: name -> group; `first`: blocks to name first.
        """
        found: dict[tuple[int, int], Array] = {}  # group, kernel blocks to a block
        for name, group in layers.items():
            if (group, self.ratio(name)) not in found:
                ordered = first.get(group, np.zeros(0, dtype=np.int64))
                rest = np.flatnonzero(groups == group)
                found[group, self.ratio(name)] = self.expand(
                    name, np.concatenate([ordered, rest[~np.isin(rest, ordered)]])
                )
        return {name: found[group, self.ratio(name)] for name, group in layers.items()}

    def ratio(self, layer: str) -> int:
        """Blocks of the layer's regions to one logical block."""
        return self.regions[layer][0].shape[0] // self.num_blocks

    def expand(self, layer: str, blocks: Array) -> Array:
        """Logical blocks as the layer's regions count them."""
        ratio = self.ratio(layer)
        return (np.asarray(blocks, dtype=np.int64)[:, None] * ratio + np.arange(ratio)).ravel()


def _pages(caches: dict[str, Any], num_blocks: int) -> list[tuple[int, int, int]]:
    """Where the bytes of a block lie: (offset of block 0, bytes, stride).

    Layers of different groups share memory, so each counts once.

    Block-outermost layouts have one row a block with all layers in it; others one region a layer, or one a
    layer and head (LHBNC).
    """
    found: dict[int, tuple[int, int]] = {}
    for cache in caches.values():
        size = cache.element_size()
        stride = cache.stride(0) * size * (cache.shape[0] // num_blocks)
        offset = cache.data_ptr() - cache.untyped_storage().data_ptr()
        if cache.shape[0] * cache.stride(0) * size == cache.untyped_storage().nbytes():
            found[0] = (stride, stride)
            continue
        outside = cache.shape[1] > 1 and cache.stride(1) * size >= stride
        for head in range(cache.shape[1] if outside else 1):
            at = offset + head * cache.stride(1) * size
            found[at] = max((stride, stride), found.get(at, (0, 0)))
    return [(base, size, stride) for base, (size, stride) in sorted(found.items())]
