"""MultiConnector with one mistake each. `Right` has none, and neither have the stores to put inside."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from tests.right_connectors.stores import WholeBlocks, WritesBehind


class Saves(WholeBlocks, SupportsHMA):
    """A store of whole blocks."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self.request_finished(request, block_ids[0])


class SavesLater(WritesBehind, SupportsHMA):
    """A store that keeps the blocks of a request until it has saved them."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self.request_finished(request, block_ids[0])


class Right(MultiConnector):
    """Nothing but MultiConnector."""


class GivesTheLoadToTheLast(MultiConnector):
    """The last connector is told to load what another one has announced."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if request.request_id in self._requests_to_connector:
            self._requests_to_connector[request.request_id] = len(self._connectors) - 1
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class SavesToTheFirst(MultiConnector):
    """Only the first connector hears that the forward pass is over."""

    def wait_for_save(self) -> None:
        self._connectors[0].wait_for_save()


class LoadsWithTheFirst(MultiConnector):
    """Only the first connector is told to begin its loads."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._connectors[0].start_load_kv(forward_context, **kwargs)
