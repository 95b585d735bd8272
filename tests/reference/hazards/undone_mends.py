"""Parts of the reference connector in which one mend is undone, for test_hazards.py.

Mends that the suite finds undone have their wrong connectors beside the suite's other ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec

from reference_connector.handshake import Listener
from reference_connector.leases import RANDOM_BITS, GivenLeases, entry_of
from reference_connector.messages import Address, Ask, Challenge, Lease, Refusal
from reference_connector.peers import Peer, Peers
from reference_connector.scheduler import SHORTENED, LeaseState, Scheduler


class LedgerGoesBack(GivenLeases):
    """Writes the number of each lease that ends, also where a later lease of the same entry has ended."""

    def _end(self, numbers: Iterable[int]) -> set[str]:
        ended = set()
        for number in numbers:
            self.ledger[entry_of(number)] = number
            ended.add(self._given.pop(number).request)
        return ended


def number_without_chance(place: int) -> int:
    """Numbers leases by their place alone, so that peers know the next ones."""
    return place << RANDOM_BITS


class RemembersEveryPeer(Peers):
    """Keeps every peer that it has ever met or missed."""

    def _take_answer(self, address: Address, peer: Peer) -> None:
        known = dict(self._peers)
        super()._take_answer(address, peer)
        self._peers = known

    def _disconnect(self, peer: Peer) -> None: ...


class AsksTheDead(Scheduler):
    """Does not hear that a peer does not answer the workers."""

    def on_worker_report(self, notified: set[Lease], missed: dict[Address, float]) -> None:
        super().on_worker_report(notified, {})


class EndsWithTheFirst(Scheduler):
    """Releases a lease when the first request that has it no longer needs it."""

    def _forget(self, name: str) -> None:
        if name in self._handoffs and name not in self._loading:
            self._leases[self._handoffs[name].lease].state = LeaseState.UNUSED
        super()._forget(name)


class BelievesTheClient(Scheduler):
    """Notes in the parameters, which a client writes, that P has stopped early."""

    def _shorten(self, request: Any) -> None:
        if not request.kv_transfer_params.get(SHORTENED):
            super()._shorten(request)
            request.kv_transfer_params[SHORTENED] = True


def ignore_the_buffer(vllm_config: Any, *args: Any) -> Any:
    """Makes a connector that does not look at kv_buffer_device."""
    from vllm.platforms import current_platform

    from reference_connector.connector import ReferenceConnector

    vllm_config.kv_transfer_config.kv_buffer_device = current_platform.device_type
    return ReferenceConnector(vllm_config, *args)


class TellsWhoIsThere(Listener):
    """Tells who asks for another engine which one is here."""

    def _challenge(self, ask: Ask, peer: bytes) -> Challenge | Refusal:
        if (ask.engine, ask.incarnation) != self._engine:
            return Refusal("the engine here is not {} but {}".format(ask.engine, " ".join(self._engine)))
        return super()._challenge(ask, peer)


def decode_all(data: bytes, kind: Any) -> Any:
    """Decodes every message of another engine, however long it is."""
    return SimpleNamespace(**{"released": [], "renewed": []} | msgspec.msgpack.decode(data))


def is_no_page(spec: Any) -> bool:
    """Takes every block for heads x tokens."""
    return False
