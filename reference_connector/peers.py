"""Peers that a worker of D has met: one handshake for each life of each engine, in a thread, shared by all who wait for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from reference_connector.boxes import Box
from reference_connector.handshake import HandshakeError, fetch
from reference_connector.messages import Address, Card
from reference_connector.plan import Pairing, Unplannable, pair
from reference_connector.transport import Transport, TransportError

logger = logging.getLogger("vllm.reference_connector.peers")
GRACE_S = 1.0  # a handshake that failed is not tried again for so long: all that wait for it hear of it


@dataclass
class Peer:
    """One life of one engine."""

    cards: tuple[Card, ...]  # of its ranks
    pairing: Pairing | Unplannable
    names: dict[int, str] = field(default_factory=dict)  # rank -> the transport's name for it, once needed
    reached: set[int] = field(
        default_factory=set
    )  # ranks of which a read has ended, which is what connects two agents for certain
    busy: int = 0  # tasks that read from it
    failed: bool = False  # one of them has failed: once nothing reads from it, it is met anew

    @contextmanager
    def used(self) -> Iterator[None]:
        """Nobody parts from it meanwhile. After a TransportError it is met anew."""
        self.busy += 1
        try:
            yield
        except TransportError:
            self.failed = True
            raise
        finally:
            self.busy -= 1


class Peers:
    """Those of one worker: `rank` of `size`, with memory as the boxes say."""

    def __init__(self, boxes: tuple[Box, ...], rank: int, size: int, transport: Transport, timeout: float):
        self._boxes, self._rank, self._size, self._transport, self._timeout = (
            boxes,
            rank,
            size,
            transport,
            timeout,
        )
        self._met: dict[Address, Peer] = {}
        self._asked: dict[Address, Future[Peer]] = {}
        self._missed: dict[
            Address, tuple[HandshakeError, float]
        ] = {}  # why, and until when it is not tried again
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="reference-connector-handshake")
        self.failed_handshakes = 0

    def meet(self, address: Address) -> Generator[None, None, Peer]:
        """The peer at an address; yields while it waits. Raises HandshakeError."""
        while (known := self._met.get(address)) is not None and known.failed:
            if not known.busy:
                self._part_from(address)
                break
            yield  # what still reads from it ends, by its deadline at the latest
        while (peer := self._met.get(address)) is None:
            error, until = self._missed.get(address, (None, 0.0))
            if error is not None and time.monotonic() < until:
                raise error
            if address not in self._asked:
                self._asked[address] = self._pool.submit(self._introduce, address)
            if not self._asked[address].done():
                yield
                continue
            future = self._asked.pop(address)
            if (failed := future.exception()) is not None:
                self.failed_handshakes += 1
                reason = (
                    failed
                    if isinstance(failed, HandshakeError)
                    else HandshakeError(f"{type(failed).__name__}: {failed}")
                )
                self._missed[address] = reason, time.monotonic() + GRACE_S
                continue
            self._missed.pop(address, None)
            for old in [
                a
                for a in self._met
                if (a.host, a.port) == (address.host, address.port) and not self._met[a].busy
            ]:
                self._part_from(old)  # what was there before has ended
            self._met[address] = future.result()
        return peer

    def _introduce(self, address: Address) -> Peer:
        """In a thread of the pool: it touches neither the transport nor anything here that changes."""
        cards = fetch(address, self._timeout)
        try:
            return Peer(cards, pair(self._boxes, [card.boxes for card in cards], self._rank, self._size))
        except Unplannable as error:
            return Peer(cards, error)  # nothing can be read from it, but it can be told so

    def name(self, peer: Peer, rank: int) -> str:
        """The transport's name for a rank. Raises TransportError."""
        if rank not in peer.names:
            peer.names[rank] = self._transport.connect(peer.cards[rank].agent)
        return peer.names[rank]

    def _part_from(self, address: Address) -> None:
        for name in self._met.pop(address).names.values():
            try:
                self._transport.disconnect(name)
            except TransportError as error:
                logger.warning("%s: %s", address.engine, error)

    def close(self) -> None:
        """End the threads, and part from everybody."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for address in list(self._met):
            self._part_from(address)
