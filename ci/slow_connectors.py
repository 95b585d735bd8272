"""Connectors with one mistake each that makes the suite wait, for ci/bench_slow.py.

All are the reference connector but for what the first sentence of their docstring says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
)

from reference_connector import ReferenceConnector


class Right(ReferenceConnector):
    """Has no mistake."""


class KeepsBlocksOnP(ReferenceConnector):
    """P never reports blocks as sent, and keeps them for ever."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = super().get_transfer_results(finished_req_ids)
        return KVConnectorTransferResults(None, found.finished_recving, found.failed_recving)


class NeverNotifies(ReferenceConnector):
    """D never notifies P that it has read blocks. P keeps them until their lease ends."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._worker._notify = _nothing  # type: ignore[method-assign]


def _nothing(*_: Any) -> Iterator[None]:
    yield from ()


class LoadsNeverEnd(ReferenceConnector):
    """D never reports the end of a load."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = super().get_transfer_results(finished_req_ids)
        return KVConnectorTransferResults(found.finished_sending, None, None)


class HangsInHook(ReferenceConnector):
    """start_load_kv of D never returns when there is something to load."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = getattr(self._get_connector_metadata(), "orders", None)
        while orders is not None and orders.loads:
            time.sleep(1)
        super().start_load_kv(forward_context, **kwargs)


class HangsInShutdown(ReferenceConnector):
    """shutdown of the worker half never returns."""

    def shutdown(self) -> None:
        while self._role is KVConnectorRole.WORKER:
            time.sleep(1)
        super().shutdown()
