"""The reference connector, and two whose reads go on when they have reported the end of the load."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

from reference_connector import ReferenceConnector
from reference_connector.transport import HOST, TransportError

__all__ = ["CancelsByRelease", "ReadsAgain", "Reference"]


class Reference(ReferenceConnector):
    """No mistake."""


class CancelsByRelease(ReferenceConnector):
    """Releases a read that takes too long, and reports the load as failed at once."""

    again = False  # whether it begins the read once more

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        reads, transport = self._worker._reads, self._worker._transport

        def read(
            peer: Any, plans: dict[int, Any], deadline: float, kv_at: Any = None
        ) -> Generator[None, None, None]:
            handles, prepared = [], []
            for rank, plan in plans.items():
                here, there = (kv_at, peer.ranks[rank].place) if kv_at else (HOST, HOST)
                name = self._worker._peers.name(peer, rank)
                prepared.append((name, plan, here, there))
                handles.append(transport.prepare(*prepared[-1]))
                transport.begin(handles[-1])
            while not all(map(transport.done, handles)) and time.monotonic() < deadline:
                yield
            late = not all(map(transport.done, handles))
            for handle in handles:
                transport.release(handle)
            if late:
                for one in prepared if self.again else ():
                    transport.begin(transport.prepare(*one))
                raise TransportError("it took too long, and was cancelled")

        reads.read = read


class ReadsAgain(CancelsByRelease):
    """Begins a read once more that took too long, and reports the load as failed at once."""

    again = True
