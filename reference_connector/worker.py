"""What to move: the half of the connector that lives in each of vLLM's workers.

A load is a generator (`_load`): it yields wherever it has to wait, and every step of the engine moves all loads on as far as they get
(`advance`). An exception ends its own load and nothing else; it is caught in one place (`_move_on`). So what it takes to say "loaded"
can be read from top to bottom:

    meet      the handshake, once per peer (peers.py)
    plan      which bytes of which ranks of P go where
    read      all ranks at once. Wherever a load ends, nothing of it is reported while one of its reads may still write
    compare   with the option integrity: is what has arrived what P has?
    ledger    was the lease still P's promise after all that? If not, the load has failed
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reference_connector import messages
from reference_connector.boxes import Box
from reference_connector.handshake import HandshakeError
from reference_connector.messages import LEDGER, Address, Card, Digest, Lease, Leases, Load, Orders, Query, encode
from reference_connector.options import Options
from reference_connector.peers import Peer, Peers
from reference_connector.plan import Runs, Table, Unplannable, runs
from reference_connector.transport import HOST, Memory, Transport, TransportError

logger = logging.getLogger("vllm.reference_connector.worker")
Task = Generator[None, None, None]
LANDING = 1 << 16  # entries of ledgers that can be read at once: what is read is 8 bytes for each load and rank


class LoadError(Exception):
    """What was read is not to be used. The message is one sentence."""


EXPECTED = (HandshakeError, Unplannable, TransportError, LoadError)  # whatever else ends a load is a mistake in here


@dataclass
class Results:
    """What has ended since the last time, by request."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)  # failed ones included
    failed: set[str] = field(default_factory=set)
    told: set[Lease] = field(default_factory=set)  # peers' leases whose release has been said, or given up


def no_stats() -> dict[str, Any]:
    """What a worker counts. Of loads that have succeeded, one entry each: from the order to the last byte; moved; runs of bytes."""
    lists: dict[str, Any] = {"seconds": [], "bytes": [], "descriptors": []}
    return lists | dict.fromkeys(("failed_loads", "failed_handshakes", "failed_notifications", "expired_leases", "late_reads"), 0)


class Worker:
    """One rank."""

    def __init__(self, options: Options, rank: int, size: int, transport: Transport, boxes: tuple[Box, ...], memory: Iterable[Memory]):
        """Make this rank's KV readable. `memory`: every allocation that boxes lie in, each once, all of one kind."""
        self._options, self._rank, self._transport, self._memory = options, rank, transport, tuple(memory)
        self._ledger = np.zeros(LEDGER, dtype=np.int64)
        self._landing = np.zeros(LANDING, dtype=np.int64)
        transport.register([*self._memory, *(Memory(array.ctypes.data, array.nbytes) for array in (self._ledger, self._landing))])
        kind, device = self._memory[0].kind, self._memory[0].device
        self.card = Card(rank, transport.metadata(), kind, device, self._ledger.ctypes.data, boxes)
        self._peers = Peers(boxes, rank, size, transport, options.handshake_timeout)
        self._results, self._stats = Results(), no_stats()
        self._loads: dict[str, Task] = {}  # by request
        self._errands: list[Task] = []  # messages to peers that may have to be met first
        self._leases: dict[int, tuple[str, float]] = {}  # of this engine: number -> request, its end
        self._last_lease = 0
        self._early: set[int] = set()  # released before this worker has heard of them: D can be faster than our own scheduler
        self._places, self._tickets = itertools.count(), itertools.count()
        self._digests: dict[int, bytes] = {}  # by ticket
        self._askers: dict[bytes, str] = {}  # the transport's names for those who have asked for one

    def close(self) -> None:
        """End threads, reads and the transport."""
        for task in (*self._loads.values(), *self._errands):
            task.close()
        self._peers.close()
        self._transport.close()

    def obey(self, orders: Orders) -> None:
        """Take what is new in this step."""
        for number, request in orders.leases.items():
            self._leases[number] = request, time.monotonic() + self._options.kv_lease_duration
            self._last_lease = max(self._last_lease, number)
            if number in self._early:
                self._early.discard(number)
                self._end(number)
        for request, load in orders.loads.items():
            self._loads[request] = self._load(load)
        if self._rank == 0:  # one messenger is enough
            news: dict[Address, Leases] = {}
            for lease in orders.releases:
                news.setdefault(lease.peer, Leases([], [])).released.append(lease.number)
            for lease in orders.renewals:
                news.setdefault(lease.peer, Leases([], [])).renewed.append(lease.number)
            self._errands += [self._tell(address, leases) for address, leases in news.items()]
        self.advance()

    def advance(self) -> None:
        """Move everything on."""
        self._listen()
        for request, load in list(self._loads.items()):
            if (error := self._move_on(load)) is None:
                continue
            del self._loads[request]
            self._results.received.add(request)
            if not isinstance(error, StopIteration):
                self._results.failed.add(request)
                self._stats["failed_loads"] += 1
                unexpected = None if isinstance(error, EXPECTED) else error
                logger.error("LoadError: request %s was not loaded: %s", request, error, exc_info=unexpected)
        self._errands = [task for task in self._errands if self._move_on(task) is None]

    @staticmethod
    def _move_on(task: Task) -> Exception | None:
        """None while the task goes on, StopIteration when it has ended, else why it has failed."""
        try:
            next(task)
        except Exception as error:
            return error
        return None

    def results(self) -> Results:
        """What has ended since the last call."""
        self.advance()
        results, self._results = self._results, Results()
        return results

    def stats(self) -> dict[str, Any]:
        """What was counted since the last call."""
        taken, self._stats = self._stats, no_stats()
        taken["failed_handshakes"], self._peers.failed_handshakes = self._peers.failed_handshakes, 0
        return taken

    # ---- P: leases -----------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Hear what peers say, and end leases whose time is over."""
        now = time.monotonic()
        try:
            heard = self._transport.notifications()
        except TransportError as error:
            logger.warning("%s", error)
            heard = []
        for message in heard:
            try:
                notice = messages.decode(message, messages.Notice)
            except messages.BadMessage as error:
                logger.warning("a notification that is none: %s", error)
                continue
            if isinstance(notice, Query):
                self._answer(notice)
            elif isinstance(notice, Digest):
                self._digests[notice.ticket] = notice.digest
            else:
                self._early |= {number for number in notice.released[:LEDGER] if number > self._last_lease and len(self._early) < LEDGER}
                for number in self._leases.keys() & notice.released:
                    self._end(number)
                for number in self._leases.keys() & notice.renewed:
                    request, end = self._leases[number]
                    self._leases[number] = request, max(end, now + self._options.kv_lease_duration * 2 / 3)
        for number in [n for n, (_, end) in self._leases.items() if end < now]:
            logger.warning("request %s was not read within its lease of %g s", self._leases[number][0], self._options.kv_lease_duration)
            self._stats["expired_leases"] += 1
            self._end(number)

    def _end(self, number: int) -> None:
        """First the ledger, then the blocks: see messages.py."""
        request, _ = self._leases.pop(number)
        self._ledger[number % LEDGER] = number
        self._results.sent.add(request)

    # ---- D: loads ------------------------------------------------------------------------------------------------------------

    def _load(self, load: Load) -> Task:
        """From the order to the last byte. Raises what made it fail, after its last read has ended."""
        handoff, lease, begun = load.handoff, load.handoff.lease, time.monotonic()
        deadline = begun + self._options.transfer_timeout
        peer = yield from self._peers.meet(lease.peer)
        if isinstance(peer.pairing, Unplannable):
            raise peer.pairing
        spans = [(part.start, part.stop) for part in load.parts]
        local = [Table(part.blocks, part.first) for part in load.parts]
        remote = [Table(blocks, first) for blocks, first in zip(handoff.remote_block_ids, handoff.remote_first_tokens, strict=True)]
        planned = {rank: plan for rank, plan in runs(peer.pairing, spans, local, remote).items() if len(plan.length)}
        kinds = {rank: (self.card.kind, peer.cards[rank].kind) for rank in planned}
        reads = [(rank, kinds[rank], *plan.descriptors(self.card.device, peer.cards[rank].device)) for rank, plan in planned.items()]
        peer.busy += 1
        try:
            yield from self._read(peer, reads, deadline)
            if self._options.integrity:
                yield from self._compare(peer, planned, deadline)
            yield from self._ask_ledger(peer, lease, list(planned), deadline)
        except TransportError:
            peer.failed = True
            raise
        finally:
            peer.busy -= 1
        self._stats["seconds"].append(time.monotonic() - begun)
        self._stats["bytes"].append(sum(plan.nbytes for plan in planned.values()))
        self._stats["descriptors"].append(sum(len(plan.length) for plan in planned.values()))

    def _read(self, peer: Peer, reads: list[tuple[int, tuple[str, str], Any, Any]], deadline: float) -> Task:
        """Read from several ranks at once, (rank, kinds of memory, local, remote) each; see `Transport.prepare`. Raises TransportError."""
        handles = []
        try:
            for rank, kinds, local, remote in reads:
                handles.append(self._transport.prepare(self._peers.name(peer, rank), kinds, local, remote))
                self._transport.begin(handles[-1])
            waiting = list(handles)
            while waiting := [handle for handle in waiting if not self._transport.done(handle)]:
                yield from self._wait(deadline)
        except GeneratorExit:  # the worker is being closed
            for handle in handles:
                self._transport.release(handle)
            raise
        except Exception:
            while handles := [handle for handle in handles if self._may_write(handle, deadline)]:
                yield
            raise
        for handle in handles:
            self._transport.release(handle)

    def _wait(self, deadline: float) -> Task:
        """Until the next step. Raises TransportError when the time of a load is over."""
        if time.monotonic() > deadline:
            raise TransportError(f"the load took longer than {self._options.transfer_timeout:g} s")
        yield

    def _may_write(self, handle: Any, deadline: float) -> bool:
        """False once a read has ended, or been cancelled, and is forgotten. Only after the deadline is one cancelled that might yet end."""
        try:
            if not self._transport.done(handle) and time.monotonic() <= deadline:
                return True
        except TransportError:
            pass  # it has failed; but does its transport know?
        return not self._transport.release(handle)

    def _ask_ledger(self, peer: Peer, lease: Lease, ranks: list[int], deadline: float) -> Task:
        """Read the lease's entry in the ledgers of these ranks. Raises LoadError if one says that it has ended."""
        places, reads = [next(self._places) % LANDING for _ in ranks], []
        for rank, place in zip(ranks, places, strict=True):
            here, there = self._landing.ctypes.data + 8 * place, peer.cards[rank].ledger + 8 * (lease.number % LEDGER)
            reads.append((rank, (HOST, HOST), np.array([[here, 8, 0]]), np.array([[there, 8, 0]])))
        yield from self._read(peer, reads, deadline)
        if (self._landing[places] >= lease.number).any():
            self._stats["late_reads"] += 1
            raise LoadError(f"{lease.peer.engine} gave the blocks of lease {lease.number} away before they had been read")

    def _tell(self, address: Address, leases: Leases) -> Task:
        """Tell every rank of a peer. If that fails the leases will end by themselves."""
        try:
            peer = yield from self._peers.meet(address)
            for rank in range(len(peer.cards)):
                try:
                    self._transport.notify(self._peers.name(peer, rank), encode(leases))
                except TransportError as error:
                    peer.failed = True
                    self._not_told(address, leases, error)
        except HandshakeError as error:
            self._not_told(address, leases, error)
        self._results.told |= {Lease(address, number) for number in leases.released}

    def _not_told(self, address: Address, leases: Leases, error: Exception) -> None:
        self._stats["failed_notifications"] += 1
        logger.warning("%s was not told about %s: %s", address.engine, leases, error)

    def _compare(self, peer: Peer, planned: dict[int, Runs], deadline: float) -> Task:
        """Ask P for a digest of what should have arrived. Raises LoadError."""
        asked = {next(self._tickets): (rank, plan) for rank, plan in planned.items()}
        for ticket, (rank, plan) in asked.items():
            where = np.stack([plan.remote, plan.length], axis=1).tobytes()
            self._transport.notify(self._peers.name(peer, rank), encode(Query(ticket, self.card.agent, where)))
        while not asked.keys() <= self._digests.keys():
            yield from self._wait(deadline)
        for ticket, (rank, plan) in asked.items():
            if self._digests.pop(ticket) != self._digest(np.stack([plan.local, plan.length], axis=1)):
                raise LoadError(f"{plan.nbytes} bytes from rank {rank} differ from those that it has")

    def _answer(self, query: Query) -> None:
        """P's half of `_compare`."""
        try:
            digest = self._digest(np.frombuffer(query.runs, dtype=np.int64).reshape(-1, 2))
            if query.agent not in self._askers:
                self._askers[query.agent] = self._transport.connect(query.agent)
            self._transport.notify(self._askers[query.agent], encode(Digest(query.ticket, digest)))
        except (TransportError, ValueError) as error:
            logger.warning("a question for a digest was not answered: %s", error)

    def _digest(self, spans: Any) -> bytes:
        """Of bytes that peers may read: int64 [n, 2] of address, length. Raises ValueError for others."""
        made = hashlib.blake2b(digest_size=16)
        for address, length in spans.tolist():
            memory = next((m for m in self._memory if m.address <= address <= address + length <= m.address + m.nbytes), None)
            if memory is None or memory.view is None:
                raise ValueError(f"no peer may read {length} bytes at {address:#x}")
            made.update(memory.view(address - memory.address, length))
        return made.digest()
