"""Scripts that hand a transfer over while the transport delays, fails or repeats on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pytest_kvconform.rigs.bytes.faulty.messages import FaultReport
from pytest_kvconform.rigs.bytes.messages import Check
from pytest_kvconform.rigs.cluster.engine import Engine, Steps
from pytest_kvconform.rigs.cluster.loop import nothing, watching
from pytest_kvconform.rigs.cluster.peers.sleeping_peer import BETWEEN_S
from pytest_kvconform.rigs.cluster.release import is_full, seconds_to_wait, until_quiet
from pytest_kvconform.rigs.cluster.transfer import TransferObservation, observe_transfer
from pytest_kvconform.rigs.cluster.turns import both
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.handle import EngineFailed, hook_calls
from pytest_kvconform.rigs.scenario import (
    NEVER,
    TWICE,
    Faults,
    Prompt,
    Transfer,
    faults_where_p_writes,
    tokens,
)

# Handed over without faults: first of all, and after each transfer that leaves traces.
AFTER = Transfer("after", (Prompt(tokens(19, seed=7)),))
COUNTING = Faults()  # no fault; `kvconform_fault` delays each transfer by 0 steps, and so counts it


@dataclass(frozen=True)
class FaultObservation:
    """A transfer with faults, and what came of it."""

    transfer: TransferObservation  # its `usage`: when D holds nothing any more, or at the deadline
    # of P and of D, all ranks together
    reports: tuple[FaultReport, FaultReport] = (FaultReport(), FaultReport())
    # A transfer without faults on the same engines; None: nothing had failed, or an engine had.
    after: TransferObservation | None = None


@dataclass(frozen=True)
class FaultlessObservation:
    """A transfer without faults between engines for which faults can be set."""

    transfer: TransferObservation
    # transfers that each rank of P and each rank of D began
    begun: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def set_faults_of_loads(p: Engine, d: Engine, faults: tuple[Faults, ...]) -> Steps:
    """Give both engines faults for the loads of a transfer that begins now.

    A store saves first, and faults are for its loads alone. So the part of a script that is returned has to
    run when everything is saved.

    While a load fails, D hands out freed blocks last. vLLM would give those of the failed load to the next
    request, and its load would hide what is still written for the failed one.
    """

    def set_in_d() -> Steps:
        yield from d.call("set_faults", faults)
        yield from d.call("reuse_last", any(one.fail for one in faults))

    yield from d.call("reuse_last", False)
    if p.spec.store:
        yield from both(p, d, "set_faults", ())
        return set_in_d
    yield from p.call("set_faults", faults_where_p_writes(faults, p.ranks, d.ranks))
    yield from set_in_d()
    return nothing


def reports_of(*engines: Engine) -> Steps:
    """The fault reports of all ranks of these engines, added up. Returns FaultReport."""
    total = FaultReport()
    for engine in engines:
        total = sum((yield from engine.call("fault_reports")), total)
    return total


def held_beyond(p: Engine, d: Engine, mine: set[str], seconds: float) -> Steps:
    """Step both engines until P holds none of these requests. Returns those that it holds when time is up."""
    deadline = watching(seconds, p, d)
    while (held := mine & set((yield from p.call("usage")).requests)) and not deadline.over():
        yield from p.call("step", 0.05)
        yield from d.call("step", 0.0)
    return held


def observe_faultless(
    p: Engine, d: Engine, transfer: Transfer, limits: Deadlines, ids: Callable[[], str]
) -> Steps:
    """Run one transfer without faults, and count the transfers that the workers begin for it.

    Returns FaultlessObservation.
    """
    found = TransferObservation(transfer, p.facts, d.facts)
    try:
        set_faults = yield from set_faults_of_loads(p, d, (COUNTING,))
        found = yield from observe_transfer(p, d, transfer, limits, ids, set_faults)
        if found.failed or found.stuck:
            return FaultlessObservation(found)
        reports = yield from both(p, d, "fault_reports")
        of_p, of_d = (tuple(one.transfers for one in of_engine) for of_engine in reports)
        return FaultlessObservation(found, (of_p if p is not d else (), of_d))
    except EngineFailed as failed:
        return FaultlessObservation(replace(found, failed=failed))


def observe_faulty(
    p: Engine,
    d: Engine,
    transfer: Transfer,
    limits: Deadlines,
    ids: Callable[[], str],
    after: Transfer = AFTER,
    back_off_s: float = 0.0,
) -> Steps:
    """Run one transfer with its faults and wait until nothing of it is under way.

    After a failure one more transfer runs, without faults. While D computes it and writes nothing wrong, it
    runs again, for `back_off_s` at most: a connector may leave a peer alone for a while. Returns
    FaultObservation.
    """
    observation, reports = yield from _observe(p, d, transfer, limits, ids)
    if observation.failed or observation.stuck or not leaves_traces(transfer):
        return FaultObservation(observation, reports)
    deadline = watching(back_off_s, p, d)
    while True:
        last, _ = yield from _observe(p, d, after, limits, ids)
        ended = last.failed or last.stuck or last.refused or last.loads or last.is_wrong
        if ended or deadline.over() or is_full(p.handle):
            return FaultObservation(observation, reports, last)
        pause = watching(BETWEEN_S, p, d)
        while not pause.over():
            yield from p.call("step", 0.05)
            yield from d.call("step", 0.05)


def _may_keep(transfer: Transfer) -> bool:
    """Whether P may keep the blocks of a transfer until their lease is over."""
    return transfer.fails or any(faults.notifications == NEVER for faults in transfer.faults)


def leaves_traces(transfer: Transfer) -> bool:
    """Whether a load failed, or notifications arrived in a way that a connector may remember."""
    return transfer.fails or any(faults.notifications in (TWICE, NEVER) for faults in transfer.faults)


def _observe(p: Engine, d: Engine, transfer: Transfer, limits: Deadlines, ids: Callable[[], str]) -> Steps:
    """One transfer with its faults. Returns TransferObservation, and the fault reports of P and of D."""
    found, reports = TransferObservation(transfer, p.facts, d.facts), (FaultReport(), FaultReport())
    hook_calls(p.handle, d.handle)  # those of an earlier transfer are forgotten
    try:
        set_faults = yield from set_faults_of_loads(p, d, transfer.faults)
        # `until_quiet` waits for blocks: P may keep some until its lease is over.
        short = limits if p.spec.store else replace(limits, release=0.0)
        found = yield from observe_transfer(p, d, transfer, short, ids, set_faults)
        if found.failed or found.stuck:
            return replace(found, calls=hook_calls(p.handle, d.handle)), reports
        mine = frozenset(r.prefill.id for r in found.requests)

        def pending() -> Steps:
            return bool((yield from reports_of(p, d)).pending)

        released = yield from until_quiet(
            p,
            d,
            seconds_to_wait(p.handle, limits.release),
            frozenset() if _may_keep(transfer) and not p.spec.store else mine,
            pending,
        )
        reports = (yield from reports_of(*(() if p is d else (p,)))), (yield from reports_of(d))
        audits = []
        for before, engine in zip(found.audits, (p, d), strict=True):
            audits.append(_first_wrong(before, (yield from engine.call("audit"))))
        found = replace(found, usage=released.usage, released=released, audits=(audits[0], audits[1]))
    except EngineFailed as failed:
        found = replace(found, failed=failed)
    return replace(found, calls=hook_calls(p.handle, d.handle)), reports


def _first_wrong(ended: tuple[Check, ...], quiet: tuple[Check, ...]) -> tuple[Check, ...]:
    """Of each rank the audit at the end of the transfer, if that found something, else the later one."""
    return tuple(first if first.pool.wrong else second for first, second in zip(ended, quiet, strict=True))
