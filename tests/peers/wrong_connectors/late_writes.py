"""The reference connector, and one that takes the release of a NIXL handle for the end of its read."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

from reference_connector import ReferenceConnector
from reference_connector.transport import HOST, TransportError

__all__ = ["CancelsByRelease", "Reference"]


class Reference(ReferenceConnector):
    """No mistake."""


class CancelsByRelease(ReferenceConnector):
    """Releases a read that takes too long, and reports the load as failed at once."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        reads, transport = self._worker._reads, self._worker._transport

        def read(
            peer: Any, plans: dict[int, Any], deadline: float, kv_at: Any = None
        ) -> Generator[None, None, None]:
            handles = []
            for rank, plan in plans.items():
                here, there = (kv_at, peer.ranks[rank].place) if kv_at else (HOST, HOST)
                name = self._worker._peers.name(peer, rank)
                handles.append(transport.prepare(name, plan, here, there))
                transport.begin(handles[-1])
            while not all(map(transport.done, handles)) and time.monotonic() < deadline:
                yield
            late = not all(map(transport.done, handles))
            for handle in handles:
                transport.release(handle)
            if late:
                raise TransportError("it took too long, and was cancelled")

        reads.read = read
