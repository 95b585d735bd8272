"""Wrong answers of request_finished."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
from vllm.v1.request import RequestStatus

from .right import Ended, Right, loads, prefills


class AnswersParamsAlone(Right):
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return super().request_finished_all_groups(request, block_ids)[1]


class KeepsInWords(Right):
    """Says yes where it keeps blocks."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        kept, params = super().request_finished_all_groups(request, block_ids)
        return "yes" if kept else "", params


class Adds(Right):
    """Adds something to P's params."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        return kept, self.add(params) if params else params

    def add(self, params: dict[str, Any]) -> Any:
        raise NotImplementedError


class AddsANumber(Adds):
    def add(self, params: dict[str, Any]) -> Any:
        return params | {"tokens": np.int64(53)}


class AddsNumberedKeys(Adds):
    def add(self, params: dict[str, Any]) -> Any:
        return {0: "host", 1: "host"} | params


class AddsProtection(Adds):
    def add(self, params: dict[str, Any]) -> Any:
        return MappingProxyType(params)


class Remembers(Right):
    """Never forgets a request that was aborted."""

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self.notes[request.request_id] = True

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if request.status != RequestStatus.FINISHED_ABORTED:
            self.notes.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


class HoldsABlock(Right):
    """Takes a block of every prefill for itself."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if prefills(request) and block_ids[0]:
            pool = self._kv_cache_manager.block_pool
            pool.touch([pool.blocks[block_ids[0][0]]])
        return super().request_finished_all_groups(request, block_ids)


class KeepsTheAborted(Right):
    """Hands over whatever P has, also of a request that was given up."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if prefills(request) and request.status in (
            RequestStatus.FINISHED_ABORTED,
            RequestStatus.FINISHED_ERROR,
        ):
            super().request_finished_all_groups(request, block_ids)
            return any(block_ids), None
        return super().request_finished_all_groups(request, block_ids)


class TellsNobodyOfWhatItKeeps(Right):
    """D keeps the blocks of a request that ends by itself. No worker is told, so that none reports it."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        given = request.kv_transfer_params is not None and not prefills(request)
        return kept or (given and request.status == RequestStatus.FINISHED_LENGTH_CAPPED), params


class HandsOverOldBlocks(Right):
    """Returns the blocks that the request was given first."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.notes.setdefault(request.request_id, blocks.get_block_ids())

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        first = self.notes.pop(request.request_id, block_ids)
        kept, params = super().request_finished_all_groups(request, block_ids)
        return kept, params | {"remote_block_ids": first} if params else params


class GivesBlocksAway(Right):
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        return False, super().request_finished_all_groups(request, block_ids)[1]


class HidesErrors(Right):
    """Gives a failed request the status of one that stopped."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if request.status == RequestStatus.FINISHED_ERROR:
            request.status = RequestStatus.FINISHED_STOPPED
        return super().request_finished_all_groups(request, block_ids)


class FreesTheCancelled(Right):
    """Frees the blocks of an aborted request itself, and does not wait for its load."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if loads(request) and request.status == RequestStatus.FINISHED_ABORTED:
            self._kv_cache_manager.free(request)
        return super().request_finished_all_groups(request, block_ids)
