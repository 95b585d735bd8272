"""P's half of a lease: how long a worker of P keeps blocks, and the ledger in which D reads its end.

A lease is given by the order of P's scheduler, prolonged by renewals, and ends when D releases it or when its
time is over. D can be faster than P's scheduler: a release that comes before the order is kept for a while.
A peer does not know the number of a lease whose hand-over it has not got (`new_number`), so that it ends none
by mistake. One that sends all 2**26 numbers of a place can: who has the key is believed.
"""

import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from reference_connector.messages import LEDGER, Leases
from reference_connector.transport import Memory

logger = logging.getLogger("vllm.reference_connector.leases")
RANDOM_BITS = 26  # of a number, below its place in the order of leases. JSON keeps 53 bits
EARLY = 1024  # releases that are kept until their order comes


def new_number(place: int) -> int:
    """The number of a lease. Numbers ascend with `place`."""
    return place << RANDOM_BITS | secrets.randbits(RANDOM_BITS)


def entry_of(number: int) -> int:
    """The entry of the ledger in which the end of a lease is written."""
    return (number >> RANDOM_BITS) % LEDGER


@dataclass
class GivenLease:
    """A lease that has not ended."""

    request: str
    until: float  # of the monotonic clock


class GivenLeases:
    """The leases that one worker of P has given. Methods return the requests whose lease has ended."""

    def __init__(self, seconds: float):
        self.ledger = np.zeros(LEDGER, np.int64)
        self.memory = Memory(self.ledger.ctypes.data, self.ledger.nbytes)
        self._seconds = seconds
        self._given: dict[int, GivenLease] = {}  # by number
        self._early: dict[int, float] = {}  # number -> until when its release is kept

    def give(self, leases: dict[int, str]) -> set[str]:
        """Begin leases: number -> request."""
        until = time.monotonic() + self._seconds
        self._given |= {number: GivenLease(request, until) for number, request in leases.items()}
        return self._end(number for number in leases if self._early.pop(number, None))

    def on_notice(self, notice: Leases) -> set[str]:
        """What a peer releases and renews."""
        now = time.monotonic()
        for number in self._given.keys() & notice.renewed:
            lease = self._given[number]
            lease.until = max(lease.until, now + self._seconds * 2 / 3)
        for number in notice.released:
            if number not in self._given and len(self._early) < EARLY:
                self._early[number] = now + self._seconds
        return self._end(self._given.keys() & notice.released)

    def expire(self) -> set[str]:
        """End leases whose time is over: no peer has read them within it."""
        now = time.monotonic()
        self._early = {number: until for number, until in self._early.items() if until > now}
        ended = self._end([number for number, lease in self._given.items() if lease.until < now])
        for request in ended:
            logger.warning("request %s was not read within its lease of %g s", request, self._seconds)
        return ended

    def _end(self, numbers: Iterable[int]) -> set[str]:
        """End leases: first write the ledger, then release the blocks; see messages.py."""
        ended = set()
        for number in numbers:
            entry = entry_of(number)  # an earlier lease may have the same one, and end later
            self.ledger[entry] = max(self.ledger[entry], number)
            ended.add(self._given.pop(number).request)
        return ended
