"""Digests of KV: with the option `integrity` D compares the bytes that it read with P's.

D sends a Query, and P writes the digest of its own bytes on its board; see messages.py. A digest is made a
slice in every step, so that neither a long hand-over nor a hostile query keeps the engine from stepping.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Generator, Iterator, Sequence

import numpy as np

from reference_connector.messages import ANSWER, ANSWERS, Query
from reference_connector.plan import Ints, Runs
from reference_connector.transport import Memory

logger = logging.getLogger("vllm.reference_connector.integrity")
STEP_S = 0.004  # for this time in each step; a slice that has begun is finished
SLICE = 1 << 20  # bytes that are digested without looking at the clock
RUNS = 1 << 15  # of a query, half a MB. D asks about a larger load in several queries
WAITING = 64  # queries that P keeps; it forgets more, and D asks again


def digest(
    memory: Sequence[Memory], addresses: Ints, lengths: Ints
) -> Generator[None, None, tuple[int, int]]:
    """Two numbers made of bytes that peers may read; yields between slices. Raises ValueError for others."""
    made, until = hashlib.blake2b(digest_size=16), time.monotonic() + STEP_S
    for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True):
        end = address + length
        found = next((m for m in memory if m.address <= address <= end <= m.address + m.nbytes), None)
        if found is None or found.view is None:
            raise ValueError(f"no peer may read {length} bytes at {address:#x}")
        for at in range(address, end, SLICE):
            made.update(found.view(at - found.address, min(SLICE, end - at)))
            if time.monotonic() > until:
                yield
                until = time.monotonic() + STEP_S
    first, second = np.frombuffer(made.digest(), dtype=np.int64).tolist()
    return first, second


def queries(plan: Runs) -> Iterator[Runs]:
    """The runs of a load, as many at a time as a query may have."""
    for at in range(0, len(plan.length), RUNS):
        yield Runs(*(numbers[at : at + RUNS] for numbers in (plan.local, plan.remote, plan.length)))


class Digests:
    """P's half: answers queries on its board, one after the other, in `work`."""

    def __init__(self, board: Ints, memory: Sequence[Memory], enabled: bool):
        """`board`: the part of the worker's board with answers."""
        self._board, self._enabled = board.reshape(ANSWERS, ANSWER), enabled
        self.memory = memory
        self._waiting: dict[int, Generator[None, None, None]] = {}  # by ticket

    def ask(self, query: Query) -> None:
        """Take a query. An engine without the option answers at once that it has no digest."""
        if not self._enabled:
            self._write(query.ticket, (0, 0))
        elif len(self._waiting) < WAITING:
            self._waiting.setdefault(query.ticket, self._answer(query))

    def work(self) -> None:
        """Continue the oldest query by a slice of time."""
        for ticket, answer in list(self._waiting.items())[:1]:
            if next(answer, answer) is answer:  # it has ended
                del self._waiting[ticket]

    def _answer(self, query: Query) -> Generator[None, None, None]:
        try:
            addresses, lengths = np.frombuffer(query.runs, dtype=np.int64).reshape(2, -1)
            asked = sum(lengths.tolist())  # integers of Python do not overflow
            if (lengths < 0).any() or asked > sum(memory.nbytes for memory in self.memory):
                raise ValueError(f"the pool has fewer bytes than the {asked} of the query")
            numbers = yield from digest(self.memory, addresses, lengths)
        except Exception as error:  # no query can end the worker
            logger.warning("a query for a digest has no answer: %s", error)
            numbers = 0, 0
        self._write(query.ticket, numbers)

    def _write(self, ticket: int, numbers: tuple[int, int]) -> None:
        entry = self._board[ticket % ANSWERS]
        entry[0] = 0  # no ticket until both numbers are written
        entry[1:3] = numbers
        entry[0] = ticket
