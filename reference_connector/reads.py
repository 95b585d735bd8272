"""Reads from the memory of peers. A read that has begun cannot be cancelled.

NIXL's `release_xfer_handle` and `remove_remote_agent` succeed while a read is in progress, and UCX goes on
writing: into blocks that another request may have by then. So a read ends in one of two ways, and NIXL
reports both: it is done, or it has failed. Until then its handle is kept, its peer stays connected, and what
waits for it waits on. Reads from a process that has died fail within a second. Reads from one that is stopped
neither fail nor end before it goes on. `tests/reference/nixl/test_nixl.py` measures all of this.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Generator
from typing import Any

import numpy as np

from reference_connector.peers import Peer, State
from reference_connector.plan import Ints, Runs
from reference_connector.transport import HOST, Memory, Place, Transport, TransportError

logger = logging.getLogger("vllm.reference_connector.reads")
Task = Generator[None, None, Any]
LANDING = 1 << 17  # entries of ledgers that can be read at once: MOST_READS of 16 ranks of 1,024 peers


class Reads:
    """The reads of one worker that are in progress, and the memory for entries of ledgers."""

    def __init__(self, transport: Transport, connect: Callable[[Peer, int], str]):
        """`connect`: the transport's name for a rank of a peer, see `Peers.name`."""
        self._transport, self._connect = transport, connect
        self._landing = np.zeros(LANDING, dtype=np.int64)
        self._free = deque(range(LANDING))  # entries of `_landing` into which no read may write
        self.memory = Memory(self._landing.ctypes.data, self._landing.nbytes)
        self.in_progress = 0  # those with a deadline: a worker that is being closed waits for them

    def read(self, peer: Peer, plans: dict[int, Runs], deadline: float, kv_at: Place | None = None) -> Task:
        """Read from several ranks at once: KV into memory at `kv_at`, or (None) entries of ledgers.

        Returns when NIXL has reported the end of every read. Raises TransportError then, if one has failed,
        or if the deadline had passed: the peer is BROKEN.
        """
        handles: list[Any] = []
        why: Exception | None = None
        peer.reads += 1
        try:
            for rank, plan in plans.items():
                here, there = (kv_at, peer.ranks[rank].place) if kv_at else (HOST, HOST)
                handles.append(self._transport.prepare(self._connect(peer, rank), plan, here, there))
                self.in_progress += deadline < float("inf")
                self._transport.begin(handles[-1])
        except Exception as error:  # the reads that have begun go on
            why = error
        while handles:
            for handle in list(handles):
                try:
                    if not self._transport.done(handle):
                        continue
                except TransportError as error:
                    why = why or error
                if self._transport.release(handle):
                    handles.remove(handle)
                    self.in_progress -= deadline < float("inf")
            if handles and why is None and time.monotonic() > deadline:
                why = TransportError("the transfer took too long")
                logger.warning("%d reads take too long. Their blocks are kept until they end", len(handles))
            if handles:
                yield
        peer.reads -= 1
        if why is not None:
            peer.state = State.BROKEN
            raise why
        peer.reached |= plans.keys()

    def read_ledgers(
        self, peer: Peer, ranks: Collection[int], entry: int, deadline: float
    ) -> Generator[None, None, Ints]:
        """Read an entry of the ledgers of several ranks. int64 [rank]."""
        while len(self._free) < len(ranks):
            yield
        places = [self._free.popleft() for _ in ranks]
        plans = {}
        for place, rank in zip(places, ranks, strict=True):
            local, remote = self.memory.address + 8 * place, peer.ranks[rank].ledger + 8 * entry
            plans[rank] = Runs(*np.array([[local], [remote], [8]]))
        try:
            yield from self.read(peer, plans, deadline)
            return self._landing[places]
        finally:  # the reads have ended, or the worker is being closed
            self._free.extend(places)
