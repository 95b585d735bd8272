"""The worker half: it moves the bytes. There is one in each of vLLM's workers.

A load is a generator (`_load`): it yields wherever it has to wait, and every step of the engine moves all
loads on as far as they get (`advance`). An exception ends its own load and nothing else; it is caught in one
place (`_advance_task`). So the steps of a load can be read from top to bottom:

    meet      the handshake, once for each peer (peers.py)
    plan      which bytes of which ranks of P go where
    read      from all ranks at once. The end of a load is not reported while one of its reads may still write
    ledger    whether the lease was still valid after the read. If not, the load has failed
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from reference_connector import messages
from reference_connector.boxes import Box
from reference_connector.handshake import HandshakeError, fetch
from reference_connector.leases import GivenLeases, entry_of
from reference_connector.messages import Address, BadMessage, Lease, Leases, Load, Orders, Rank
from reference_connector.options import Options
from reference_connector.peers import Peers, State
from reference_connector.plan import Table, Unplannable, pair, runs
from reference_connector.reads import Reads, Task
from reference_connector.transport import Memory, Transport, TransportError
from reference_connector.trust.authentication import ANYBODY, Trust

logger = logging.getLogger("vllm.reference_connector.worker")
CLOSING_S = 2.0  # for so long a worker that is being closed waits for reads that are in progress
# After a notification over TCP, a read over shared memory waits for a call of the peer (docs/findings.md). So
# a read of no use follows each one, unless so many reads from it are in progress: it may stand still then.
MOST_READS = 8


class LoadError(Exception):
    """The bytes that were read must not be used. The message is one sentence."""


EXPECTED = (HandshakeError, Unplannable, TransportError, LoadError)  # others are mistakes of this connector


@dataclass
class Results:
    """What has ended since the last call, by request, and what the scheduler half has to know of peers."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)  # failed ones included
    failed: set[str] = field(default_factory=set)
    notified: set[Lease] = field(default_factory=set)  # peers know of these releases, or cannot be reached
    missed: dict[Address, float] = field(default_factory=dict)  # peers not to ask, for so many seconds


def no_stats() -> dict[str, Any]:
    """The counters of a worker. The lists have one entry for each load that succeeded."""
    lists: dict[str, Any] = {"seconds": [], "bytes": [], "descriptors": []}
    return lists | dict.fromkeys(
        ("failed_loads", "failed_handshakes", "failed_notifications", "expired_leases", "late_reads"), 0
    )


class Worker:
    """One rank."""

    def __init__(
        self,
        options: Options,
        rank: int,
        size: int,
        transport: Transport,
        boxes: tuple[Box, ...],
        memory: Iterable[Memory],
        trust: Trust = ANYBODY,
        zeroed: bool = False,
    ):
        """Make this rank's KV readable. `memory`: every allocation with boxes, each once, all of one kind.

        `zeroed`: whether vLLM zeroes new blocks of attention, except those that a connector loads.
        """
        attention = tuple(box for box in boxes if not box.part.startswith(("conv", "ssm")))
        self._to_zero = pair(attention, [attention]) if zeroed else None
        self._options, self._rank, self._transport, self._memory = options, rank, transport, tuple(memory)
        self._leases = GivenLeases(options.kv_lease_duration)
        ask = partial(fetch, timeout=options.handshake_timeout, trust=trust)
        self._peers = Peers(boxes, rank, size, transport, ask)
        self._reads = Reads(transport, self._peers.name)
        transport.register([*self._memory, self._leases.memory, self._reads.memory])
        self.published = Rank(transport.metadata(), self._memory[0].place, self._leases.memory.address, boxes)
        self._results, self._stats = Results(), no_stats()
        self._loads: dict[str, Task] = {}  # by request
        self._notifications: list[Task] = []  # to peers that may have to be met first

    def close(self) -> None:
        """End threads, reads and the transport: with it end reads from a peer that does not answer."""
        deadline = time.monotonic() + CLOSING_S
        while self._reads.in_progress and time.monotonic() < deadline:
            self.advance()
            time.sleep(0.001)
        for task in (*self._loads.values(), *self._notifications):
            task.close()
        self._peers.close()
        self._transport.close()

    def start(self, orders: Orders) -> None:
        """Start what the scheduler orders in this step."""
        self._results.sent |= self._leases.give(orders.leases)
        self._loads |= {request: self._load(load) for request, load in orders.loads.items()}
        if self._rank == 0:  # one rank notifies peers for all
            for peer in {lease.peer for lease in (*orders.releases, *orders.renewals)}:
                released = [lease.number for lease in orders.releases if lease.peer == peer]
                renewed = [lease.number for lease in orders.renewals if lease.peer == peer]
                self._notifications.append(self._notify(peer, Leases(released, renewed)))
        self.advance()

    def advance(self) -> None:
        """Continue all loads and notifications as far as they get."""
        self._listen()
        for request, load in list(self._loads.items()):
            if (error := self._advance_task(load)) is not None:
                del self._loads[request]
                self._results.received.add(request)
                if not isinstance(error, StopIteration):
                    self._results.failed.add(request)
                    self._stats["failed_loads"] += 1
                    logger.error("LoadError: request %s was not loaded: %s", request, error)
        tasks, self._notifications = self._notifications, []  # a task may add another one
        self._notifications += [task for task in tasks if self._advance_task(task) is None]

    @staticmethod
    def _advance_task(task: Task) -> Exception | None:
        """None while the task goes on, StopIteration when it has ended, otherwise the error that ended it."""
        try:
            next(task)
        except Exception as error:
            if not isinstance(error, (StopIteration, *EXPECTED)):
                logger.error("a mistake in this connector: %s", error, exc_info=error)
            return error
        return None

    def results(self) -> Results:
        """What has ended since the last call."""
        self.advance()
        self._results.missed, self._peers.missed = self._peers.missed, {}
        self._stats["failed_handshakes"] += len(self._results.missed)
        results, self._results = self._results, Results()
        return results

    def stats(self) -> dict[str, Any]:
        """The counters since the last call."""
        taken, self._stats = self._stats, no_stats()
        return taken

    # ---- P: leases

    def _listen(self) -> None:
        """Read notifications of peers, and end leases whose time is over."""
        try:
            received = self._transport.notifications()
        except TransportError as error:
            logger.warning("%s", error)
            received = []
        for message in received:
            try:
                self._results.sent |= self._leases.on_notice(messages.decode(message, Leases))
            except BadMessage as error:
                logger.warning("a notification is not a message of this connector: %s", error)
        expired = self._leases.expire()
        self._stats["expired_leases"] += len(expired)
        self._results.sent |= expired

    # ---- D: loads

    def _load(self, load: Load) -> Task:
        """A load, from the order to the last byte. It raises why it fails, when its last read has ended."""
        handoff, lease, begun = load.handoff, load.handoff.lease, time.monotonic()
        deadline = begun + self._options.transfer_timeout
        peer = yield from self._peers.meet(lease.peer, deadline)
        if isinstance(peer.pairing, Unplannable):
            raise peer.pairing
        spans = [(group.start, group.stop) for group in load.groups]
        remote = list(map(Table, handoff.remote_block_ids, handoff.remote_first_tokens))
        found = runs(peer.pairing, spans, load.groups, remote)
        planned = {rank: plan for rank, plan in found.items() if len(plan.length)}
        self._zero_ends(load)
        yield from self._reads.read(peer, planned, deadline, self.published.place)
        ended = yield from self._reads.read_ledgers(peer, planned, entry_of(lease.number), deadline)
        if (ended >= lease.number).any():
            self._stats["late_reads"] += 1
            raise LoadError(f"{lease.peer} freed the blocks of lease {lease.number} before D had read them")
        self._stats["seconds"].append(time.monotonic() - begun)
        self._stats["bytes"].append(sum(plan.nbytes for plan in planned.values()))
        self._stats["descriptors"].append(sum(len(plan.length) for plan in planned.values()))

    def _zero_ends(self, load: Load) -> None:
        """Zero what vLLM would have zeroed and a load does not read: before its first token, after its last.

        Attention kernels also multiply what they mask out, and words of a previous owner can be NaN.
        """
        if self._to_zero is None:
            return
        size = {match.mine.group: match.mine.tokens * match.mine.pieces for match in self._to_zero.matches}
        before = [(group.first, group.start) for group in load.groups]
        after = [(g.stop, g.first + len(g.blocks) * size.get(i, 0)) for i, g in enumerate(load.groups)]
        for spans in (before, after):
            for plan in runs(self._to_zero, spans, load.groups, load.groups).values():
                for address, length in zip(plan.local.tolist(), plan.length.tolist(), strict=True):
                    memory = next(m for m in self._memory if 0 <= address - m.address < m.nbytes)
                    if memory.zero is not None:
                        memory.zero(address - memory.address, length)

    def _notify(self, address: Address, leases: Leases) -> Task:
        """Notify every rank of a peer. If that fails, the leases end when their time is over."""
        deadline = time.monotonic() + self._options.handshake_timeout
        try:
            peer = yield from self._peers.meet(address, deadline)
            ranks = set(range(len(peer.ranks)))
            if new := ranks - peer.reached:
                # Read from them first: NIXL might not send a first message if this engine stops stepping.
                self._notifications.append(self._reads.read_ledgers(peer, new, 0, deadline))
            while not peer.reached >= ranks:
                if peer.state is State.BROKEN or time.monotonic() > deadline:
                    raise TransportError(f"{address} does not answer")
                yield
            for rank in ranks:
                self._transport.notify(self._peers.name(peer, rank), messages.encode(leases))
        except (HandshakeError, TransportError) as error:
            self._stats["failed_notifications"] += 1
            logger.warning("%s was not notified of %s: %s", address, leases, error)
            return
        finally:  # after any error the engine may stop stepping
            self._results.notified |= {Lease(address, number) for number in leases.released}
        if peer.reads < MOST_READS:
            yield from self._reads.read_ledgers(peer, ranks, 0, float("inf"))
