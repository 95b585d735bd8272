"""Transfers over a transport that misbehaves: pattern engines whose NIXL agents obey, and what stands in their pools afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from model_matrix import parse_topology
from pytest_kvconform.result import Blocked, Cell
from pytest_kvconform.rigs.bytes.handover import TransferObservation, observe_transfer
from pytest_kvconform.rigs.bytes.messages import Check
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.handover import Deadlines
from pytest_kvconform.rigs.engine.messages import Usage
from pytest_kvconform.rigs.peers.faulty_engine import FaultyEngineHandle
from pytest_kvconform.rigs.peers.faulty_nixl import FaultReport
from pytest_kvconform.rigs.scenario import NEVER, TWICE, Prompt, Transfer, tokens

if TYPE_CHECKING:
    from pytest_kvconform.rigs.bytes.bench import ByteBench

AFTER = Transfer(
    "after", (Prompt(tokens(19, seed=7)),)
)  # handed over without faults, at first and after each that leaves traces
LONGEST = 240  # tokens: of one transfer, and of what P keeps of earlier ones until its lease is over
LEASE = "kv_lease_duration"  # vLLM's NixlConnector: seconds P keeps what nobody reads; key of kv_connector_extra_config
LEASE_S = 2  # long enough for every read; its heartbeats prolong it by a third less
LEASE_DEFAULT_S = 30
PATIENCE_S = 8  # longer leases are not waited for
DEATHS = 3  # transfers of one cell that may end an engine or not end at all, before the rest is not tried


@dataclass(frozen=True)
class FaultSeen:
    """A transfer with faults, and what came of it."""

    seen: TransferObservation  # its `usage` is that of the moment when D holds nothing any more, or of the deadline
    struck: tuple[FaultReport, FaultReport] = (
        FaultReport(),
        FaultReport(),
    )  # on P and on D, all ranks together
    after: TransferObservation | None = (
        None  # a transfer without faults on the same engines; None: nothing had failed, or an engine had
    )


class FaultBench:
    """Pairs of engines of one cell whose transport can misbehave: one pair for each policy for failed loads."""

    def __init__(self, pattern: ByteBench):
        self.pattern = pattern
        self._pairs: dict[tuple[Cell, str], tuple[FaultyEngineHandle, FaultyEngineHandle]] = {}
        self._seen: dict[tuple[Cell, str], FaultSeen] = {}
        self._deaths: dict[Cell, list[str]] = {}

    def agents(self, policy: str) -> int:
        """NIXL agents that the connector makes in the engines of the current cell."""
        p, d = self._engines(policy)
        return sum(struck.agents for engine in (p, d) for struck in engine.fault_reports())

    def observe(self, transfer: Transfer) -> FaultSeen:
        """What a transfer with faults shows in the current cell; runs it on first use. Raises Blocked where it cannot be run."""
        key = self.pattern.bench.cell, transfer.name
        if key not in self._seen:
            p, d = self._engines(transfer.policy)
            found = self._seen[key] = observe_faulty(
                transfer, p, d, self.pattern.limits, lambda: next(self.pattern.names)
            )
            last = found.after or found.seen
            if last.failed or last.stuck:
                self._deaths.setdefault(key[0], []).append(
                    last.failed.sentence if last.failed else last.stuck[0]
                )
                self._end(key[0], transfer.policy)
        return self._seen[key]

    def kept(self, transfer: Transfer) -> tuple[str, ...]:
        """Requests of a transfer that P still holds when their lease is over. Raises Blocked where that would take too long."""
        found = self.observe(transfer)
        assert found.seen.usage is not None
        mine = {r.prefill.id for r in found.seen.requests}
        if not mine & set(found.seen.usage[0].requests):
            return ()
        if self.lease_s > PATIENCE_S:
            raise Blocked(
                f"P may keep what nobody has read for {self.lease_s:.0f} s: "
                f"declare `lease`, the key of kv_connector_extra_config for these seconds, and a shorter one is asked for ({LEASE_S} s)"
            )
        p, d = self._engines(transfer.policy)
        deadline = time.monotonic() + self.lease_s + self.pattern.limits.release
        while (held := mine & set(p.usage().requests)) and time.monotonic() < deadline:
            p.step(0.05)
            d.step()
        return tuple(sorted(held))

    @property
    def lease_s(self) -> float:
        """Seconds P may keep what nobody reads."""
        return float(
            self._config("P")
            .get("kv_connector_extra_config", {})
            .get(self.pattern.bench.subject.lease or LEASE, LEASE_DEFAULT_S)
        )

    def drop(self) -> None:
        """End all engines."""
        for cell, policy in list(self._pairs):
            self._end(cell, policy)

    def _end(self, cell: Cell, policy: str) -> None:
        for engine in self._pairs.pop((cell, policy), ()):
            engine.end()

    def _config(self, role: str) -> dict[str, Any]:
        """The fields of vLLM's KVTransferConfig, with a short lease where it is known how, unless the user has given one."""
        config, key = self.pattern.config(role), self.pattern.bench.subject.lease
        if key:
            config = config | {
                "kv_connector_extra_config": {key: self.shortest_lease}
                | config.get("kv_connector_extra_config", {})
            }
        return config

    @property
    def shortest_lease(self) -> float:
        """Seconds: on a slow machine a read takes longer, too."""
        return LEASE_S * max(1.0, self.pattern.bench.settings.timeout_scale)

    def _engines(self, policy: str) -> tuple[FaultyEngineHandle, FaultyEngineHandle]:
        pattern, bench = self.pattern, self.pattern.bench
        cell = bench.cell
        if (cell, policy) in self._pairs:
            return self._pairs[cell, policy]
        if len(deaths := self._deaths.get(cell, [])) >= DEATHS:
            raise Blocked(
                f"transfers of {cell} on a transport with faults failed {len(deaths)} times, last: {deaths[-1]}"
            )
        if not pattern.current(cell) and not any(other == cell for other, _ in self._pairs):
            bench.drop()  # the engines of another cell
        tp = dict(zip("PD", parse_topology(cell.topology), strict=True))
        bench.progress(f"starting P (TP {tp['P']}) and D (TP {tp['D']}) with a transport that can fail")
        name, pair = next(pattern.names), list[FaultyEngineHandle]()
        try:
            for role in "PD":
                spec = pattern.spec(role, cell, tp[role], LONGEST)
                config = {**spec.kv_transfer_config, **self._config(role), "kv_load_failure_policy": policy}
                spec = msgspec.structs.replace(spec, kv_transfer_config=config)
                pair.append(
                    FaultyEngineHandle(
                        bench.address, f"{cell}-{role}-{name}", spec, pattern.patience, pattern.limits.start
                    )
                )
            for engine in pair:
                engine.wait_ready()
        except EngineFailed as failed:
            for engine in pair:
                engine.end()
            self._deaths.setdefault(cell, []).extend([failed.sentence] * DEATHS)
            raise Blocked(
                f"stands on kv::bytes/start::engines_start[{cell}]: {failed.sentence}",
                refused=failed.declined,
            ) from None
        self._pairs[cell, policy] = pair[0], pair[1]
        self._introduce(cell, policy, *pair)
        return pair[0], pair[1]

    def _introduce(self, cell: Cell, policy: str, p: FaultyEngineHandle, d: FaultyEngineHandle) -> None:
        """Hand something over without faults, so that peers have met and what follows is the faults' doing. Raises Blocked if it fails.

        A connector that makes no NIXL agent even now is not asked for more: no fault can be planned for it.
        """
        limits = self.pattern.limits
        seen = observe_transfer(AFTER, p, d, limits, lambda: next(self.pattern.names))
        reason = seen.failed.sentence if seen.failed else "; ".join(seen.stuck) or seen.refused
        if reason and (
            seen.failed or sum(struck.agents for engine in (p, d) for struck in engine.fault_reports())
        ):
            self._end(cell, policy)
            self._deaths.setdefault(cell, []).extend([f"not even without faults: {reason}"] * DEATHS)
            raise Blocked(
                f"stands on kv::bytes/handover::completes: without any fault a transfer did not end well: {reason}"
            )


def observe_faulty(
    transfer: Transfer,
    p: FaultyEngineHandle,
    d: FaultyEngineHandle,
    limits: Deadlines,
    ids: Callable[[], str],
) -> FaultSeen:
    """Run one transfer with its faults and wait until nothing of it is under way; after a failure hand one more over without faults."""
    seen, struck = _observe(transfer, p, d, limits, ids)
    if seen.failed or seen.stuck or not leaves_traces(transfer):
        return FaultSeen(seen, struck)
    return FaultSeen(seen, struck, _observe(AFTER, p, d, limits, ids)[0])


def leaves_traces(transfer: Transfer) -> bool:
    """Whether something failed, or came in a way that a connector may remember."""
    return transfer.fails or any(faults.notifications in (TWICE, NEVER) for faults in transfer.faults)


def _observe(
    transfer: Transfer,
    p: FaultyEngineHandle,
    d: FaultyEngineHandle,
    limits: Deadlines,
    ids: Callable[[], str],
) -> tuple[TransferObservation, tuple[FaultReport, FaultReport]]:
    seen, struck = TransferObservation(transfer, p.facts, d.facts), (FaultReport(), FaultReport())
    try:
        for engine in (p, d):
            engine.set_faults(transfer.faults)
        # Blocks are waited for below: P may keep some until its lease is over.
        seen = observe_transfer(transfer, p, d, replace(limits, release=0.0), ids)
        if seen.failed or seen.stuck:
            return seen, struck
        usage = _quiet(
            transfer, p, d, time.monotonic() + limits.release, {r.prefill.id for r in seen.requests}
        )
        struck = _struck(p), _struck(d)
        p_audits, d_audits = (
            _first_wrong(now, engine.audit()) for now, engine in zip(seen.audits, (p, d), strict=True)
        )
        seen = replace(seen, usage=usage, audits=(p_audits, d_audits))
    except EngineFailed as failed:
        seen = replace(seen, failed=failed)
    return seen, struck


def _quiet(
    transfer: Transfer, p: FaultyEngineHandle, d: FaultyEngineHandle, deadline: float, mine: set[str]
) -> tuple[Usage, Usage]:
    """Step both engines until no transfer and no message is under way and neither holds anything of this transfer."""
    may_keep = transfer.fails or any(faults.notifications == NEVER for faults in transfer.faults)
    while True:
        d.step()
        p.step()
        usage = p.usage(), d.usage()
        free = usage[1].free_blocks == usage[1].total_blocks and not usage[1].unfinished
        held = bool(mine & set(usage[0].requests)) and not may_keep
        if (
            free and not held and not any(_struck(engine).pending for engine in (p, d))
        ) or time.monotonic() > deadline:
            return usage


def _first_wrong(ended: tuple[Check, ...], quiet: tuple[Check, ...]) -> tuple[Check, ...]:
    """Of each rank the audit at the end of the transfer if it found something, else the one made when nothing was under way any more."""
    return tuple(first if first.pool.wrong else second for first, second in zip(ended, quiet, strict=True))


def _struck(engine: FaultyEngineHandle) -> FaultReport:
    return sum(engine.fault_reports(), FaultReport())
