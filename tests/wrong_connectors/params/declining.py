"""Connectors that do not support sliding windows or prefix hits, and what they do when a cell has them."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from .right import Right

Answer = tuple[int | None, bool]


class WithWindows(Right):
    """`windows`: whether there are any."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.windows = any(
            isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in kv_cache_config.kv_cache_groups
        )


class DeclinesMemory(WithWindows):
    """Says so when it is given their memory."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self.windows:
            raise NotImplementedError("sliding windows are not supported")
        super().register_kv_caches(kv_caches)


class DeclinesIntroduction(WithWindows):
    """Says so when its halves meet."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        if self.windows:
            raise ValueError("this engine has sliding windows, and they are not supported")
        super().set_xfer_handshake_metadata_pp_aware(metadata)


class AnnouncesNothing(WithWindows):
    """D computes whatever has windows."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        return (
            (0, False) if self.windows else super().get_num_new_matched_tokens(request, num_computed_tokens)
        )


class HandsNothingOver(WithWindows):
    """P keeps nothing of what has windows, and says nothing about it."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return (False, None) if self.windows else super().request_finished_all_groups(request, block_ids)


# ---- no clean refusals ---------------------------------------------------------------------------


class Stumbles(WithWindows):
    """Has no place for them."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self.windows:
            raise KeyError("sliding_window")
        super().register_kv_caches(kv_caches)


class SaysNoWord(WithWindows):
    """Raises, and says nothing."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self.windows:
            raise NotImplementedError
        super().register_kv_caches(kv_caches)


class DeclinesTooLate(WithWindows):
    """Says so when a request ends, and takes the engine along."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        if self.windows:
            raise NotImplementedError("sliding windows are not supported")
        return super().request_finished_all_groups(request, block_ids)


class LoadsTooMuchBehindHits(Right):
    """Announces a block more than there is where D has something in its own cache."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (count + 16 if num_computed_tokens and count else count), is_async
