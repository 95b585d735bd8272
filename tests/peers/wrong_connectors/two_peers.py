"""Mistakes of the reference connector that show only where a D loads from two P's."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from reference_connector import ReferenceConnector

__all__ = ["PairsOnce", "PairsWithTheLast"]


class PairsOnce(ReferenceConnector):
    """Takes where the KV of the first P lies for where that of every P lies."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.pairings: list[Any] = []
        peers = self._worker._peers
        meet = peers.meet

        def meet_and_pair(address: Any, deadline: float) -> Generator[None, None, Any]:
            peer = yield from meet(address, deadline)
            self.pair(peer)
            return peer

        peers.meet = meet_and_pair

    def pair(self, peer: Any) -> None:
        self.pairings.append(peer.pairing)
        peer.pairing = self.pairings[0]


class PairsWithTheLast(PairsOnce):
    """Keeps where the KV of a P lies by the rank alone: the P that it meets next overwrites it."""

    def pair(self, peer: Any) -> None:
        if not hasattr(peer, "was_met"):
            peer.was_met = True
            self.pairings.append(peer.pairing)
        peer.pairing = self.pairings[-1]
