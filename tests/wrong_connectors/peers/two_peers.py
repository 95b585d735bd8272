"""Mistakes of the reference connector that show only where a D has two P's, or a P two D's."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Any

from reference_connector import ReferenceConnector

__all__ = ["CountsNoticesOfAll", "LoadsOrReleases", "OnePeerAStep", "PairsOnce", "PairsWithTheLast"]


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


class CountsNoticesOfAll(ReferenceConnector):
    """Each D numbers its notices, so that P takes none twice. P has one account for all D's."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        transport = self._worker._transport
        notify, notifications = transport.notify, transport.notifications
        sent, seen = itertools.count(), set[bytes]()

        def notify_with_number(peer: Any, notice: bytes) -> None:
            notify(peer, next(sent).to_bytes(8, "big") + notice)

        def notices_not_seen() -> list[bytes]:
            new = [notice for notice in notifications() if notice[:8] not in seen]
            seen.update(notice[:8] for notice in new)
            return [notice[8:] for notice in new]

        transport.notify, transport.notifications = notify_with_number, notices_not_seen


class OnePeerAStep(ReferenceConnector):
    """D releases leases of one P in a step, and forgets those of other P's."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = getattr(self._get_connector_metadata(), "orders", None)
        if orders is not None and orders.releases:
            lost = [lease for lease in orders.releases if lease.peer != orders.releases[0].peer]
            orders.releases = [lease for lease in orders.releases if lease not in lost]
            self._report.notified |= set(lost)
        super().start_load_kv(forward_context, **kwargs)


class LoadsOrReleases(ReferenceConnector):
    """The metadata of a step that begins loads has no releases, and those are forgotten."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        if metadata.orders.loads:
            for lease in metadata.orders.releases:
                self._scheduler._leases.pop(lease, None)
            metadata.orders.releases = []
        return metadata
