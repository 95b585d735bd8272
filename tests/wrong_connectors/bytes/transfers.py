"""Connectors with one mistake each: in the addresses of NixlConnector, or in D's cache after a read.

All of them are vLLM's NixlConnector, or ReferenceConnector, but for what the first sentence of their
docstring says. Engines import this module under its full name; nothing here is imported by the tests
themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from reference_connector import ReferenceConnector
from reference_connector.messages import GroupLoad
from tests.right_connectors.amount import MovesNothing, PartOfABlock
from tests.wrong_connectors.engine import (
    AnnouncesLess,
    BacksOff,
    CorruptsCache,
    DropsTail,
    Groups,
    KeepsBlocks,
    LateByOne,
    NeverFinishes,
    RaisesAtStart,
    RaisesInLoad,
    RaisesInShortLoad,
    Right,
    WritesNull,
    WritesOutside,
)

from .hooks import *  # noqa: F403
from .statistics import *  # noqa: F403

# Wrong in the same way for the engine tier.
__all__ = [
    "AnnouncesLess",
    "BacksOff",
    "DropsTail",
    "KeepsBlocks",
    "LateByOne",
    "MovesNothing",
    "NeverFinishes",
    "PartOfABlock",
    "RaisesAtStart",
    "RaisesInLoad",
    "RaisesInShortLoad",
    "ReferenceConnector",
    "Right",
    "WritesNull",
    "WritesOutside",
]


# ---- which addresses are read --------------------------------------------------------------------


class Worker(Right):
    """`change` replaces functions of the worker half before it knows any address."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.change(self.connector_worker)
        super().register_kv_caches(kv_caches)

    def change(self, worker: Any) -> None:
        raise NotImplementedError


class LocalStride(Worker):
    """Finds P's blocks with D's block stride."""

    def change(self, worker: Any) -> None:
        build = worker._build_fa_remote

        def build_fa_remote(plan: Any, meta: Any, ratio: int) -> Any:
            return build(plan, replace(meta, block_strides=worker.block_stride_per_layer), ratio)

        worker._build_fa_remote = build_fa_remote


class HeadsOfTheOtherRank(Worker):
    """Each rank of D reads the heads of the other."""

    def change(self, worker: Any) -> None:
        build = worker._build_fa_remote

        def build_fa_remote(plan: Any, meta: Any, ratio: int) -> Any:
            return build(replace(plan, rank_offset_factor=1 - plan.rank_offset_factor), meta, ratio)

        worker._build_fa_remote = build_fa_remote


class CutsAcrossSegments(Worker):
    """Cuts P's convolution state in one piece, not Q, K and V each."""

    def change(self, worker: Any) -> None:
        conv = worker._conv_decomp

        class Cut(type(conv)):  # type: ignore[misc]
            def remote_conv_offsets(self, rank: int, ratio: int) -> list[tuple[int, int]]:
                sizes, begin = self.proj_bytes, rank * sum(self.proj_bytes)
                return [(begin + sum(sizes[:i]), size) for i, size in enumerate(sizes)]

        object.__setattr__(conv, "__class__", Cut)


class ForgetsDraft(Worker):
    """Reads every layer but the one of the draft model."""

    def change(self, worker: Any) -> None:
        compute = worker._compute_desc_ids

        def compute_desc_ids(*args: Any, **kwargs: Any) -> Any:
            ids, sizes = compute(*args, **kwargs), kwargs["region_num_blocks"]
            (draft,) = (i for i, mla in enumerate(worker._region_is_mla) if not mla)
            first = sum(sizes[:draft])
            return ids[(ids < first) | (ids >= first + sizes[draft])]

        worker._compute_desc_ids = compute_desc_ids


class WritesToP(Worker):
    """Copies D's blocks to P, instead of P's to D."""

    def change(self, worker: Any) -> None:
        make = worker.nixl_wrapper.make_prepped_xfer

        def make_prepped_xfer(operation: str, *args: Any, **kwargs: Any) -> Any:
            return make("WRITE", *args, **kwargs)

        worker.nixl_wrapper.make_prepped_xfer = make_prepped_xfer


class FirstGroupForAll(Right):
    """Reads P's blocks of the first group for the layers of every group."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for meta in self.loads().values():
            first = list(meta.remote.block_ids[0])
            meta.remote.block_ids = tuple(first[-len(theirs) :] for theirs in meta.remote.block_ids)
        super().start_load_kv(forward_context, **kwargs)


class ShortWindow(Right):
    """Counts the blocks of a window as if every window began at a block."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            blocks = self.connector_scheduler.blocks_per_sw
            self.connector_scheduler.blocks_per_sw = [count - 1 if count else 0 for count in blocks]


class TakesTheHitForTheWindow(ReferenceConnector):
    """Loads nothing for layers with a window if D's own prefix hit is as long as the window."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self.hit = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        load = self._scheduler._orders.loads.get(request.request_id)
        for index, group in enumerate(self._scheduler._groups if load else ()):
            if 0 < group.window <= self.hit:
                load.groups[index] = GroupLoad()


# ---- what D's cache holds after the read ---------------------------------------------------------


class ReadsFromTheWindow(CorruptsCache):
    """Of the block in which a window begins nothing is read that stands before the window."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.before = dict[int, Any]()  # id() of a layer's cache -> its first block of the window, as it was
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for meta in self.loads().values():
            for group, blocks in zip(self.kv_cache_config.kv_cache_groups, meta.local_block_ids, strict=True):
                for cache in self.caches(group) if self.window(group) and blocks else ():
                    self.before[id(cache)] = cache[blocks[0]].clone()
        super().start_load_kv(forward_context, **kwargs)

    def caches(self, group: Any) -> list[Any]:
        return [self.layers[name].kv_cache for name in group.layer_names]

    def window(self, group: Any) -> int:
        return getattr(group.kv_cache_spec, "sliding_window", None) or 0

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        for cache in layers:
            if (before := self.before.get(id(cache))) is not None:
                cache[blocks[0]][:, :14] = before[:, :14]  # 542 tokens, a window of 512, blocks of 16


class Reorders(CorruptsCache):
    """`reorder` returns the rows of each block, [block, head, token, plane, byte] without gaps, as taken."""

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        for cache in layers:
            rows = cache[blocks].contiguous().view(torch.uint8).unflatten(-1, (2, -1))
            cache[blocks] = self.reorder(rows).contiguous().flatten(-2).view(cache.dtype)

    def reorder(self, rows: Any) -> Any:
        raise NotImplementedError


class SwapsHeads(Reorders):
    """Heads 2 and 5 are exchanged."""

    def reorder(self, rows: Any) -> Any:
        return rows[:, [0, 1, 5, 3, 4, 2, 6, 7]]


class ReversesHeads(Reorders):
    """The last head comes first."""

    def reorder(self, rows: Any) -> Any:
        return rows.flip(1)


class SwapsPlanes(Reorders):
    """K stands where V belongs, and V where K belongs."""

    def reorder(self, rows: Any) -> Any:
        return rows.flip(3)


class PackedAsSplit(Reorders):
    """Takes K and V of each token for K of all tokens and then V of all tokens."""

    def reorder(self, rows: Any) -> Any:
        return rows.reshape(*rows.shape[:2], 2, -1, rows.shape[-1]).transpose(2, 3)


class NhdInHnd(Reorders):
    """Puts blocks that have all heads of a token together where all tokens of a head are together."""

    def reorder(self, rows: Any) -> Any:
        return rows.transpose(1, 2).reshape(rows.shape)


# ---- when ----------------------------------------------------------------------------------------


# What one half says to the other; both are in one process at tensor parallel size 1.
HANDED_OVER: dict[str, list[int]] = {}  # request -> blocks of P that are to be read
UNDER_WAY: set[str] = set()  # requests of which vLLM knows nothing any more


class Goes(Right):
    """`UNDER_WAY` keeps the engine running after its last request, as pushed writes do."""

    def has_pending_push_work(self) -> bool:
        return bool(UNDER_WAY)


class ReportsEarly(Goes):
    """Reports a load as finished in the step that begins it, and reads after the forward of the next step."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.new, self.held = dict[str, Any](), dict[str, Any]()
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.new = {name: meta for name, meta in self.loads().items() if any(meta.local_block_ids)}
        for name in self.new:
            del self.loads()[name]
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if self.held:
            begun = NixlConnectorMetadata()
            begun.reqs_to_recv = self.held
            self.connector_worker.start_load_kv(begun)
        results = super().get_transfer_results(finished_req_ids)
        UNDER_WAY.difference_update(results.finished_recving)
        results.finished_recving = set(self.new)
        UNDER_WAY.update(self.new)
        self.held = self.new
        return results


class FreesAtOnce(Goes):
    """P gives its blocks back as soon as it has computed them, and D reads them later."""

    def request_finished_all_groups(
        self, request: Any, block_ids: Groups
    ) -> tuple[bool, dict[str, Any] | None]:
        waits, params = super().request_finished_all_groups(request, block_ids)
        if waits:
            UNDER_WAY.add(request.request_id)
        return False, params

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        UNDER_WAY.difference_update(results.finished_sending)
        results.finished_sending.clear()
        return results


class ClearsWhatWasRead(Right):
    """P fills its blocks with zeros when D has read them."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.caches = list(kv_caches.values())
        super().register_kv_caches(kv_caches)

    def request_finished_all_groups(
        self, request: Any, block_ids: Groups
    ) -> tuple[bool, dict[str, Any] | None]:
        HANDED_OVER[request.request_id] = [block for blocks in block_ids for block in blocks]
        return super().request_finished_all_groups(request, block_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request in results.finished_sending:
            blocks = HANDED_OVER.pop(request)
            for cache in self.caches:
                cache[blocks] = 0
        return results


class LeavesStaleRows(ReferenceConnector):
    """Leaves what was there before a load in the rest of the last block."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._worker._to_zero = None


class LoadsPartsOfBlocks(ReferenceConnector):
    """Loads P's part of the block in which a window begins; D's prefix cache gets the whole block."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        vllm_config.cache_config.enable_prefix_caching, caching = (
            False,
            vllm_config.cache_config.enable_prefix_caching,
        )
        super().__init__(vllm_config, role, kv_cache_config)
        vllm_config.cache_config.enable_prefix_caching = caching
