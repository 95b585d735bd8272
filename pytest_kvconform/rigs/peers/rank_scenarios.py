"""What each rank of an engine reports, and when: stories on one P and the ranks of one D, one after the other."""

from __future__ import annotations

import time

from msgspec.structs import replace

from pytest_kvconform.rigs.engine.handover import PREFILL
from pytest_kvconform.rigs.peers.scenario_engines import HELD, Desk, StorySeen
from pytest_kvconform.rigs.peers.stepping import Actor, Steps, pause, until
from pytest_kvconform.rigs.scenario import STATUS, Faults

RANKS = ("P9", "D9")  # the engines
AWHILE_S = 0.2  # in which engines step often enough for whatever else is to happen


def last_rank(d: Actor, faults: Faults) -> Faults:
    """The same for the last rank of D alone."""
    return replace(faults, ranks=(d.handle.ranks - 1,))


def handed_over(desk: Desk, p: Actor, d: Actor) -> Steps:
    """Requests go from P to D, one of them to a D whose last rank is slow. Others of P are handed to nobody, or are aborted."""
    first = yield from desk.compute(p)
    ends = {"first": (yield from desk.receive(d, first))}
    second = yield from desk.compute(p)
    held = yield from desk.hold(d, second, last_rank(d, HELD))
    if not isinstance(held, str):
        yield from pause(desk.bench.patience(AWHILE_S))
        yield from d.ask("let_go")
        ends["slow"] = yield from desk.end(d, *held)
    own = yield from desk.receive(p, None)
    aborted = desk.request(desk.next(), "p", PREFILL)
    yield from p.ask("add_and_abort", aborted)
    last = yield from desk.compute(p)
    ends["last"] = yield from desk.receive(d, last)
    handed = {"first": first, "last": last} | ({"slow": second} if "slow" in ends else {})
    yield from desk.free(p)
    return StorySeen(ends, handed, ids={"own": own.id, "aborted": aborted.id})


def quiet(desk: Desk, p: Actor, d: Actor) -> Steps:
    """D loads one request and has nothing to compute meanwhile. If that does not end, it gets something to compute."""
    handed = yield from desk.compute(p)
    added, request = time.monotonic(), (yield from desk.begin(d, handed))
    by_itself = yield from until(lambda: request.id in d.ends, desk.limits.release)
    if not by_itself:
        yield from desk.receive(d, None)
    ended = yield from desk.end(d, request, added)
    return StorySeen({"quiet": ended}, {"quiet": handed}, numbers={"by_itself": by_itself})


def given_up(desk: Desk, p: Actor, d: Actor) -> Steps:
    """A request is aborted on D before it was scheduled: D has nothing to load, and P's blocks are not wanted any more."""
    handed = yield from desk.compute(p)
    request = desk.request(handed.number, "d", handed.params)
    yield from d.ask("add_and_abort", request)
    yield from desk.freed(p, handed, desk.limits.release)
    last = yield from desk.compute(p)
    ends = {"last": (yield from desk.receive(d, last))}
    return StorySeen(ends, {"given_up": handed, "last": last}, ids={"given_up": request.id})


def aborted(desk: Desk, p: Actor, d: Actor) -> Steps:
    """A request is aborted on D while it is loaded; the transfers end later."""
    handed = yield from desk.compute(p)
    held = yield from desk.hold(d, handed, HELD)
    if isinstance(held, str):
        return StorySeen(missing=held)
    request, _ = held
    yield from d.ask("abort", request.id)
    yield from pause(desk.bench.patience(AWHILE_S))
    before, early = (yield from d.ask("usage")), (yield from d.ask("reports"))
    yield from d.ask("let_go")
    after = yield from desk.free(d)
    audits = yield from d.ask("audit")
    ends = {"last": (yield from desk.receive(d, (yield from desk.compute(p))))}
    usage = {"before": before, "after": after}
    return StorySeen(ends, {"aborted": handed}, audits, usage, ids={"aborted": request.id}, early=early)


def failed(desk: Desk, p: Actor, d: Actor) -> Steps:
    """The last rank of D cannot read one request."""
    handed = yield from desk.compute(p)
    held = yield from desk.hold(d, handed, last_rank(d, Faults(transfers=(0,), fail=STATUS)))
    if isinstance(held, str):
        return StorySeen(missing=held)
    ends = {"failed": (yield from desk.end(d, *held))}
    ends["last"] = yield from desk.receive(d, (yield from desk.compute(p)))
    return StorySeen(ends, {"failed": handed})
