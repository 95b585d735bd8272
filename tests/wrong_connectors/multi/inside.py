"""Connectors with one mistake each that shows inside MultiConnector alone."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.right_connectors.answers import FailsByBlocks


class ListsWhatFailed(FailsByBlocks):
    """Returns a list of the blocks of a load that has failed. Alone, vLLM takes that of one rank."""

    def get_block_ids_with_load_errors(self) -> Any:
        found = super().get_block_ids_with_load_errors()
        return list(found) if found else found


class FailsNoneBeside(FailsByBlocks):
    """Reports a load that has failed only if the engine has no other connector."""

    def get_block_ids_with_load_errors(self) -> Any:
        found = super().get_block_ids_with_load_errors()
        return found if get_kv_transfer_group() is self else set()
