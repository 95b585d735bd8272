"""ReferenceConnectors with one mistake each, for ci/soak.py and ci/second_turn.py.

Engines import this module under its full name.
"""

from __future__ import annotations

import ctypes
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from reference_connector import ReferenceConnector

BIG = 64  # bytes: shorter reads are of ledgers


class LeaksHandles(ReferenceConnector):
    """Keeps the handle of every read, and releases none."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        kept: list[Any] = []
        self._worker._transport.release = lambda handle: not kept.append(handle)


class KeepsPeers(ReferenceConnector):
    """Disconnects from no peer that is gone."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._worker._peers._disconnect = lambda peer: None


class KeepsBlocks(ReferenceConnector):
    """P never reports that D has read a request."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = super().get_transfer_results(finished_req_ids)
        return KVConnectorTransferResults(set(), found.finished_recving, found.failed_recving)


class OneWrongByte(ReferenceConnector):
    """Corrupts one byte of every tenth read."""

    number = 9

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        transport, reads = self._worker._transport, dict[Any, int]()  # handle -> an address that it writes to
        prepare, done = transport.prepare, transport.done

        def note(peer: str, runs: Any, *places: Any) -> Any:
            handle = prepare(peer, runs, *places)
            if runs.nbytes > BIG:
                reads[handle] = int(runs.local[0])
            return handle

        def corrupt(handle: Any) -> bool:
            ended = done(handle)
            if ended and handle in reads and list(reads).index(handle) % 10 == self.number:
                ctypes.c_uint8.from_address(reads[handle] + 13).value ^= 1
            return ended

        transport.prepare, transport.done = note, corrupt


class SpoilsTheSecond(OneWrongByte):
    """Corrupts one byte of the second read, and of every tenth after it."""

    number = 1
