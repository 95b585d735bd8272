"""Connectors that read recurrent states in transfers of their own: a right one, and some with one mistake."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec

from reference_connector import ReferenceConnector
from reference_connector.leases import entry_of
from reference_connector.plan import Table, runs
from reference_connector.transport import TransportError
from reference_connector.worker import LoadError


class StatesApart(ReferenceConnector):
    """Right: reads attention and states at the same time, and waits for both. The reference connector reads
    everything in one transfer.
    """

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._worker._load = self.load

    def load(self, load: Any) -> Iterator[None]:
        worker, lease = self._worker, load.handoff.lease
        deadline = time.monotonic() + worker._options.transfer_timeout
        peer = yield from worker._peers.meet(lease.peer, deadline)
        remote = list(map(Table, load.handoff.remote_block_ids, load.handoff.remote_first_tokens))
        of_states = [
            isinstance(group.kv_cache_spec, MambaSpec) for group in self._kv_cache_config.transfer_groups
        ]
        reads, ranks = [], set[int]()
        for states in (False, True):
            spans = [
                (group.start, group.stop) if of_state == states else (0, 0)
                for group, of_state in zip(load.groups, of_states, strict=True)
            ]
            found = runs(peer.pairing, spans, load.groups, remote)
            planned = {rank: plan for rank, plan in found.items() if len(plan.length)}
            reads.append(worker._reads.read(peer, planned, deadline, worker.published.place))
            ranks |= planned.keys()
        worker._zero_ends(load)
        yield from self.wait(*reads)
        ended = yield from worker._reads.read_ledgers(peer, ranks, entry_of(lease.number), deadline)
        if (ended >= lease.number).any():
            raise LoadError("P freed the blocks before D had read them")

    def wait(self, attention: Iterator[None], states: Iterator[None]) -> Iterator[None]:
        """Let both transfers go on until they have ended. Raises TransportError if one has failed."""
        failed = yield from together(attention, states)
        if failed:
            raise next(iter(failed.values()))


class ForgetsSlowState(StatesApart):
    """Reports a load when its attention has come, whatever becomes of the state."""

    def wait(self, attention: Iterator[None], states: Iterator[None]) -> Iterator[None]:
        next(states, None)
        self._worker._notifications.append(states)  # goes on with the steps, and nobody waits for it
        yield from attention


class ForgetsFailedState(StatesApart):
    """Waits for both, and reports a load as failed only if its attention has not come."""

    def wait(self, attention: Iterator[None], states: Iterator[None]) -> Iterator[None]:
        failed = yield from together(attention, states)
        if attention in failed:
            raise failed[attention]


def together(*tasks: Iterator[None]) -> Iterator[None]:
    """Let tasks go on until all have ended. Returns those that have failed, and why."""
    going, failed = list(tasks), dict[Iterator[None], TransportError]()
    while going:
        for task in list(going):
            try:
                next(task)
            except StopIteration:
                going.remove(task)
            except TransportError as error:
                going.remove(task)
                failed[task] = error
        if going:
            yield
    return failed
