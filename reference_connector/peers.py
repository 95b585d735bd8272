"""Peers of a worker of D: one handshake for each life of each engine, in a thread, for all waiting loads."""

import enum
import logging
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from reference_connector.boxes import Box
from reference_connector.handshake import HandshakeError
from reference_connector.messages import Address, Rank
from reference_connector.plan import Pairing, Unplannable, pair
from reference_connector.transport import Transport, TransportError

logger = logging.getLogger("vllm.reference_connector.peers")
Fetch = Callable[[Address], tuple[Rank, ...]]
Answer = tuple[tuple[Rank, ...], Pairing | Unplannable]  # no load can read from an Unplannable peer
THREADS = 32  # of handshakes: a peer that does not answer keeps one until handshake_timeout
PEERS = 1024  # that a worker remembers. It forgets those that were used longest ago, and asks them anew
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # after a failed handshake; each pause is twice the one before


class State(enum.Enum):
    """ASKED -> MET -> BROKEN -> ASKED, or ASKED -> MISSED -> ASKED."""

    ASKED = "a thread waits for the answer to the handshake"
    MET = "loads read from it"
    BROKEN = "a read has failed: it is asked anew, once no read from it is in progress"
    MISSED = "the handshake has failed: it is asked anew after a pause"


@dataclass
class Peer:
    """One life of one engine, as one worker of D knows it."""

    answer: Future[Answer]
    state: State = State.ASKED
    # MISSED
    why: str = ""
    pause: float = 0.0  # seconds; the one before, until the handshake has failed again
    until: float = 0.0  # of the monotonic clock
    # MET, BROKEN
    ranks: tuple[Rank, ...] = ()
    pairing: Pairing | Unplannable = field(init=False)
    names: dict[int, str] = field(default_factory=dict)  # rank -> the transport's name for it, once needed
    # Ranks from which a read has ended. Only that makes sure that two NIXL agents are connected.
    reached: set[int] = field(default_factory=set)
    reads: int = 0  # in progress


class Peers:
    """The peers of one worker: rank `rank` of `size`, whose memory `boxes` describe."""

    def __init__(self, boxes: tuple[Box, ...], rank: int, size: int, transport: Transport, fetch: Fetch):
        """`fetch`: handshake.fetch, with all but its first argument."""
        self._boxes, self._rank, self._size = boxes, rank, size
        self._transport, self._fetch = transport, fetch
        self._peers: dict[Address, Peer] = {}  # those that were used last are last
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="reference-connector-handshake")
        self.missed: dict[Address, float] = {}  # handshakes that failed -> seconds until the next one

    def meet(self, address: Address, deadline: float) -> Generator[None, None, Peer]:
        """The peer at an address, after a handshake if need be; yields meanwhile. Raises HandshakeError.

        `deadline`: how long to wait for reads that are in progress from a peer that is BROKEN. It cannot be
        disconnected before: after `remove_remote_agent` NIXL no longer reports the end of a read.
        """
        while (peer := self._peer(address)).state is not State.MET:
            if peer.state is State.MISSED:
                raise HandshakeError(peer.why)
            if peer.state is State.BROKEN and time.monotonic() > deadline:
                raise HandshakeError(f"reads from {address} are in progress, and others have failed")
            yield
        return peer

    def _peer(self, address: Address) -> Peer:
        """The peer at an address, in the state that it has by now."""
        peer = self._peers.pop(address, None)
        pause_over = peer and peer.state is State.MISSED and time.monotonic() >= peer.until
        broken = peer and peer.state is State.BROKEN and not peer.reads
        if peer is None or pause_over or broken:
            if peer is not None:
                self._disconnect(peer)
            peer = Peer(self._threads.submit(self._handshake, address), pause=peer.pause if peer else 0.0)
        self._peers[address] = peer
        if peer.state is State.ASKED and peer.answer.done():
            self._take_answer(address, peer)
        return peer

    def _handshake(self, address: Address) -> Answer:
        """Runs in a thread, so it uses neither the transport nor changing state of this."""
        ranks = self._fetch(address)
        try:
            return ranks, pair(self._boxes, [rank.boxes for rank in ranks], self._rank, self._size)
        except Unplannable as error:
            return ranks, error

    def _take_answer(self, address: Address, peer: Peer) -> None:
        """The handshake has ended: the peer is MET or MISSED."""
        idle = [a for a, p in self._peers.items() if p.state is not State.ASKED and not p.reads]
        forgotten = set(idle[: max(0, len(self._peers) - PEERS)])
        try:
            peer.ranks, peer.pairing = peer.answer.result()
            peer.state, peer.pause = State.MET, 0.0
            # Earlier lives of this engine.
            forgotten |= {a for a in idle if (a.host, a.port) == (address.host, address.port)}
        except Exception as error:
            peer.state = State.MISSED
            peer.why = str(error) if isinstance(error, HandshakeError) else f"{type(error).__name__}: {error}"
            peer.pause = min(max(FIRST_PAUSE_S, 2 * peer.pause), LONGEST_PAUSE_S)
            peer.until = time.monotonic() + peer.pause
            self.missed[address] = peer.pause
        for old in forgotten:
            self._disconnect(self._peers.pop(old))

    def name(self, peer: Peer, rank: int) -> str:
        """The transport's name for a rank. Raises TransportError."""
        if rank not in peer.names:
            peer.names[rank] = self._transport.connect(peer.ranks[rank].agent)
        return peer.names[rank]

    def _disconnect(self, peer: Peer) -> None:
        for name in peer.names.values():
            try:
                self._transport.disconnect(name)
            except TransportError as error:
                logger.warning("%s", error)

    def close(self) -> None:
        """End the threads, and disconnect from all peers."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for peer in self._peers.values():
            self._disconnect(peer)
