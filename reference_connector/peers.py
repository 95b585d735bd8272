"""Peers of a worker of D: one handshake for each life of each engine, in a thread, for all waiting loads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from reference_connector.boxes import Box
from reference_connector.handshake import HandshakeError
from reference_connector.messages import Address, Card
from reference_connector.plan import Pairing, Unplannable, pair
from reference_connector.transport import Transport, TransportError

logger = logging.getLogger("vllm.reference_connector.peers")
Ask = Callable[[Address], tuple[Card, ...]]
GRACE_S = 1.0  # a failed handshake is not repeated for this time; all loads that wait for it fail with it


@dataclass
class Peer:
    """One life of one engine."""

    cards: tuple[Card, ...]  # of its ranks
    pairing: Pairing | Unplannable
    names: dict[int, str] = field(default_factory=dict)  # rank -> the transport's name for it, once needed
    # Ranks from which a read has ended. Only that makes sure that two NIXL agents are connected.
    reached: set[int] = field(default_factory=set)
    busy: int = 0  # tasks that read from this peer
    failed: bool = False  # a read has failed: a new handshake follows once no task reads from this peer

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the peer connected meanwhile. After a TransportError a new handshake follows."""
        self.busy += 1
        try:
            yield
        except TransportError:
            self.failed = True
            raise
        finally:
            self.busy -= 1


class Peers:
    """The peers of one worker: rank `rank` of `size`, whose memory `boxes` describe."""

    def __init__(self, boxes: tuple[Box, ...], rank: int, size: int, transport: Transport, ask: Ask):
        """`ask`: handshake.fetch, with all but its first argument."""
        self._boxes, self._rank, self._size = boxes, rank, size
        self._transport, self._ask = transport, ask
        self._met: dict[Address, Peer] = {}
        self._asked: dict[Address, Future[Peer]] = {}
        self._missed: dict[Address, tuple[HandshakeError, float]] = {}  # why, and until when not to ask again
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="reference-connector-handshake")
        self.failed_handshakes = 0

    def meet(self, address: Address, deadline: float) -> Generator[None, None, Peer]:
        """The peer at an address, after a handshake if need be; yields meanwhile. Raises HandshakeError.

        A peer from which a read has failed is disconnected first, once no other read from it is in progress:
        after `remove_remote_agent` NIXL no longer reports the end of a read. `deadline` is for that.
        """
        while (known := self._met.get(address)) is not None and known.failed:
            if not known.busy:
                self._disconnect(address)
                break
            if time.monotonic() > deadline:
                raise HandshakeError(f"reads from {address.engine} are in progress, and others have failed")
            yield
        while (peer := self._met.get(address)) is None:
            error, until = self._missed.get(address, (None, 0.0))
            if error is not None and time.monotonic() < until:
                raise error
            if address not in self._asked:
                self._asked[address] = self._pool.submit(self._handshake, address)
            if not self._asked[address].done():
                yield
                continue
            future = self._asked.pop(address)
            if (failed := future.exception()) is not None:
                self.failed_handshakes += 1
                if not isinstance(failed, HandshakeError):
                    failed = HandshakeError(f"{type(failed).__name__}: {failed}")
                self._missed[address] = failed, time.monotonic() + GRACE_S
                continue
            self._missed.pop(address, None)
            same_place = [a for a in self._met if (a.host, a.port) == (address.host, address.port)]
            for old in same_place:  # earlier lives of this engine
                if not self._met[old].busy:
                    self._disconnect(old)
            self._met[address] = future.result()
        return peer

    def _handshake(self, address: Address) -> Peer:
        """Runs in a thread of the pool, so it uses neither the transport nor changing state of this."""
        cards = self._ask(address)
        try:
            return Peer(cards, pair(self._boxes, [card.boxes for card in cards], self._rank, self._size))
        except Unplannable as error:
            return Peer(cards, error)  # no load can read from this peer, but leases can be released

    def name(self, peer: Peer, rank: int) -> str:
        """The transport's name for a rank. Raises TransportError."""
        if rank not in peer.names:
            peer.names[rank] = self._transport.connect(peer.cards[rank].agent)
        return peer.names[rank]

    def _disconnect(self, address: Address) -> None:
        for name in self._met.pop(address).names.values():
            try:
                self._transport.disconnect(name)
            except TransportError as error:
                logger.warning("%s: %s", address.engine, error)

    def close(self) -> None:
        """End the threads, and disconnect from all peers."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for address in list(self._met):
            self._disconnect(address)
