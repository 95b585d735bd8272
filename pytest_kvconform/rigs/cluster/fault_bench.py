"""The bench of cases on faults: byte engines whose transport delays, fails or repeats on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from pytest_kvconform.result import Blocked, Cell, blocked_by
from pytest_kvconform.rigs.bytes.faulty.engine import FaultyEngineHandle
from pytest_kvconform.rigs.bytes.faulty.messages import FaultReport
from pytest_kvconform.rigs.bytes.specs import byte_engine_spec
from pytest_kvconform.rigs.cluster.byte_bench import SLOW_CALLS, blocked_by_start
from pytest_kvconform.rigs.cluster.engine import Steps
from pytest_kvconform.rigs.cluster.faults import (
    AFTER,
    FaultlessObservation,
    FaultObservation,
    held_beyond,
    observe_faultless,
    observe_faulty,
    reports_of,
)
from pytest_kvconform.rigs.cluster.loop import play
from pytest_kvconform.rigs.cluster.pairs import EnginePairs
from pytest_kvconform.rigs.cluster.peers.sleeping_peer import BACK_OFF_S
from pytest_kvconform.rigs.cluster.release import SOON_S, is_full
from pytest_kvconform.rigs.cluster.transfer import TransferObservation, observe_transfer
from pytest_kvconform.rigs.context import Deadlines, RunContext
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.messages import listed
from pytest_kvconform.rigs.scenario import (
    Transfer,
    lengthened,
)

MOST_TOKENS = 240  # tokens: of one transfer, and of earlier ones that P keeps until their lease is over
HELD = 8  # prompts that P and D hold at once: of a transfer, and of earlier ones
Pair = tuple[FaultyEngineHandle, FaultyEngineHandle]
LEASE_S = 2  # long enough for every read; NIXL's heartbeats prolong it by a third less
# Transfers of one cell that may end an engine or not end at all, before the rest is not tried. After each one
# new engines hand something over without faults, so that the next failure has a cause of its own.
DEATHS = 6
AGAIN = 0.1  # of a deadline: how long a request is waited for in a cell in which one has not ended


class FaultBench:
    """Pairs of engines whose transport can fail: one pair for each policy for failed loads."""

    def __init__(self, context: RunContext):
        self.context = context
        alone, remark = context.subject.is_same_engine, " with a transport that can fail"
        self.pairs = EnginePairs(context, FaultyEngineHandle, SLOW_CALLS, remark, alone=alone)
        self._observations: dict[tuple[Cell, str, int], FaultObservation] = {}
        self._deaths: dict[Cell, list[str]] = {}
        self._given_up: dict[Cell, str] = {}  # why no other transfer of a cell is tried
        self._refused: dict[Cell, EngineFailed] = {}  # how the connector declined to start
        # Requests that P has kept beyond their lease, of transfers whose engines have ended.
        self._beyond_lease: dict[tuple[Cell, str, int], tuple[str, ...]] = {}
        self._keeps: set[Cell] = set()  # cells in which P has kept a request beyond its lease
        self._loads: set[tuple[Cell, str]] = set()  # pairs of engines of which D has loaded AFTER each time
        self._faultless: dict[tuple[Cell, str], FaultlessObservation] = {}

    def means(self, cell: Cell, transfer: Transfer) -> FaultReport:
        """With what faults are set in the engines of a cell: NIXL agents, and hooks of the connector."""
        found: FaultReport = play(reports_of, *self._engines(cell, transfer))
        return found

    def without_faults(self, cell: Cell, transfer: Transfer, longer: int = 0) -> FaultlessObservation:
        """The observation of a transfer without its faults; runs it on first use, once for each policy.

        `longer`: tokens that are added to each prompt. Raises Blocked if it cannot run.
        """
        key = cell, _word(transfer, longer)
        if key not in self._faultless:
            p, d = self._engines(cell, transfer, longer)
            faultless = lengthened(replace(transfer, faults=(), fails=False), longer)
            self._faultless[key] = self._play(observe_faultless, p, d, faultless)
            if (found := self._faultless[key].transfer).failed or found.stuck:
                sentence = found.failed.sentence if found.failed else str(found.stuck[0])
                self._deaths.setdefault(cell, []).append(sentence)
                self.pairs.end(*key)
        return self._faultless[key]

    def observe(self, cell: Cell, transfer: Transfer, longer: int = 0) -> FaultObservation:
        """The observation of a transfer with faults; runs it on first use.

        `longer`: tokens that are added to each prompt; such transfers have a pair of engines of their own.
        Raises Blocked if it cannot run.
        """
        key = cell, transfer.name, longer
        if key not in self._observations:
            p, d = self._engines(cell, transfer, longer)
            pair = cell, _word(transfer, longer)
            found = self._observations[key] = self._play(
                observe_faulty,
                p,
                d,
                lengthened(transfer, longer),
                limits=self._deadlines(cell),
                after=lengthened(AFTER, longer),
                back_off_s=self.context.scaled_seconds(BACK_OFF_S) if pair in self._loads else 0.0,
            )
            if found.after and not found.after.loads:
                self._loads.discard(pair)
            last = found.after or found.transfer
            self.context.note("request", bool(last.stuck))
            self.context.note("call", last.failed is not None and last.failed.how == "hung")
            if last.failed or last.stuck:
                sentence = last.failed.sentence if last.failed else str(last.stuck[0])
                self._deaths.setdefault(cell, []).append(sentence)
                self.pairs.end(*pair)
            elif is_full(p) and (p.spec.store or not self.context.has_long_lease(self._asked_lease_s)):
                self._beyond_lease[key] = self.kept(cell, transfer, longer)
                self.pairs.end(*pair)
        found = self._observations[key]
        self.context.shown_calls[:] = found.transfer.calls + (found.after.calls if found.after else ())
        return found

    def kept(self, cell: Cell, transfer: Transfer, longer: int = 0) -> tuple[str, ...]:
        """Requests of a transfer that P still holds when their lease is over.

        Raises Blocked if that would take too long. A store keeps none for a peer, and has no lease.
        """
        found, key = self.observe(cell, transfer, longer).transfer, (cell, transfer.name, longer)
        assert found.usage is not None
        if key in self._beyond_lease:
            return self._beyond_lease[key]
        held = {r.prefill.id for r in found.requests} & set(found.usage[0].requests)
        if not held or self.context.subject.is_store:
            return tuple(sorted(held))
        self.context.require_short_lease(self._asked_lease_s)
        return self._wait_for_lease(cell, *self._engines(cell, transfer, longer), found)

    def _wait_for_lease(
        self, cell: Cell, p: FaultyEngineHandle, d: FaultyEngineHandle, found: TransferObservation
    ) -> tuple[str, ...]:
        """Requests of a transfer that P still holds when their lease is over.

        Once P has kept a request for so long, the cause is established in this cell, and the wait is short.
        """
        seconds = SOON_S if cell in self._keeps else self.lease_s + self.context.deadlines.release
        held = play(partial(held_beyond, mine={r.prefill.id for r in found.requests}, seconds=seconds), p, d)
        if held:
            self._keeps.add(cell)
        return tuple(sorted(held))

    def _play(
        self,
        script: Callable[..., Steps],
        p: FaultyEngineHandle,
        d: FaultyEngineHandle,
        transfer: Transfer,
        **more: Any,
    ) -> Any:
        """Run a script that hands a transfer over. Returns its result."""
        more = {"limits": self.context.deadlines, "ids": self.context.next_name} | more
        return play(partial(script, transfer=transfer, **more), p, d)

    def _deadlines(self, cell: Cell) -> Deadlines:
        """The deadlines of a transfer with faults."""
        full, short = self.context.deadlines, Deadlines.scaled(AGAIN * self.context.settings.timeout_scale)
        return replace(full, request=min(full.request, short.request)) if self._deaths.get(cell) else full

    @property
    def lease_s(self) -> float:
        """Seconds for which P may keep blocks that no peer reads."""
        return self.context.lease_s(self._asked_lease_s)

    @property
    def _asked_lease_s(self) -> float:
        """Seconds of the lease that the suite asks for."""
        return self.context.asked_lease_s(LEASE_S)

    def _engines(self, cell: Cell, transfer: Transfer, longer: int = 0) -> Pair:
        """P and D of a cell, running, after one transfer without faults. Raises Blocked."""
        self.context.require_known_handover("byte", store=True, alone=True)
        word = _word(transfer, longer)
        if cell in self._refused:
            raise blocked_by_start(cell, self._refused[cell])
        if not self.pairs.running(cell, word):
            if why := self._given_up.get(cell):
                raise Blocked(f"no other transfer of {cell} with faults is tried: {why}")
            if len(deaths := self._deaths.get(cell, [])) >= DEATHS:
                raise Blocked(f"transfers of {cell} with faults failed {DEATHS} times, last: {deaths[-1]}")
        try:
            new, lease_s = not self.pairs.running(cell, word), self._asked_lease_s
            room = MOST_TOKENS + HELD * longer
            p, d = self.pairs.pair(
                cell,
                lambda role, tp, folder: byte_engine_spec(
                    self.context, cell, role, room, folder, lease_s, transfer.policy, fake=transfer.fake
                ),
                word,
            )
        except EngineFailed as failed:
            self._given_up[cell] = failed.sentence
            if failed.declined:
                self._refused[cell] = failed
            raise blocked_by_start(cell, failed) from None
        if new:
            self._introduce(cell, word, p, d, longer)
        return p, d

    def _introduce(
        self, cell: Cell, word: str, p: FaultyEngineHandle, d: FaultyEngineHandle, longer: int
    ) -> None:
        """Hand something over without faults, so that peers have met, and what follows comes from the faults.

        Raises Blocked if that fails. A connector without NIXL agents and without `kvconform_fault` is not
        asked for more: no fault can be set for it.
        """
        found = self._play(observe_transfer, p, d, lengthened(AFTER, longer))
        if found.loads:
            self._loads.add((cell, word))
        reason = found.failed.sentence if found.failed else listed(found.stuck) or found.refused
        means: FaultReport = play(reports_of, p, d)
        if reason and (found.failed or means.agents or means.hooks):
            self.pairs.end(cell, word)
            self._given_up[cell] = f"one without faults did not end well: {reason}"
            why = f"a transfer without faults did not end well: {reason}"
            raise blocked_by("kv::bytes/handover::completes", why)


def _word(transfer: Transfer, longer: int) -> str:
    """The word of a pair of engines, see EnginePairs."""
    return " ".join(filter(None, (transfer.policy, transfer.fake, "long" if longer else "")))
