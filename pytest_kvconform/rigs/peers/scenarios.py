"""What happens between peers, as stories: somebody cannot be reached, is slow, is started anew, comes too late, or is asked nonsense."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from pytest_kvconform.rigs.peers.hostile_clients import (
    Deaf,
    Stranger,
    elsewhere,
    named_in,
    ports_of,
    questions,
    speaks_zeromq,
)
from pytest_kvconform.rigs.peers.rank_scenarios import RANKS, aborted, failed, given_up, handed_over, quiet
from pytest_kvconform.rigs.peers.scenario_engines import HELD, Desk, StorySeen
from pytest_kvconform.rigs.peers.stepping import Actor, Steps, pause, until
from pytest_kvconform.rigs.processes.ports import free_port

STALL_S = 1.0  # that a peer stands still; a hook that waits for it takes as long
QUESTIONS = 1000
CHUNK = 50  # questions at a time; the first of them once more as bytes that are no message
ASKED_S = 5.0  # in which D is to have asked the one who does not answer
HEARD_S = 0.2  # in which questions arrive
LATER = 1.3  # leases that a request waits
NO_PORT = "its kv_transfer_params name no port on which P listens"


@dataclass(frozen=True)
class Story:
    """A story and the engines it stands on, by name. The first letter of a name is the role."""

    tell: Callable[..., Steps]  # tell(desk, *actors) -> StorySeen
    engines: tuple[str, ...]
    borrows: tuple[
        str, ...
    ] = ()  # further ones, which hand something over in its beginning; what becomes of them is not its own
    after: str = ""  # a story that ends before this one begins
    leases: bool = False  # whether it waits for one to end
    early: bool = False  # begins while engines of other stories are being started: it has the longest to wait


# ---- somebody cannot be reached -----------------------------------------------------------------------------------------------


def borrow(desk: Desk, other: Actor) -> Steps:
    """Let somebody compute a prompt whose params are going to lead elsewhere. Returns Handed and the ports on which it listens."""
    bad = yield from desk.compute(other)
    desk.borrowed += 1
    return bad, ports_of(other.handle.process.pid)


def dead(desk: Desk, p: Actor, d: Actor, other: Actor) -> Steps:
    """Nobody listens where D is sent for one of three requests; another one comes from a peer that D has met."""
    met = yield from desk.receive(d, (yield from desk.compute(p)))
    bad, ports = yield from borrow(desk, other)
    good = yield from desk.compute(p)
    if not named_in(bad.params, ports):
        return StorySeen(missing=NO_PORT)
    params = elsewhere(bad.params, ports, free_port())
    ends = yield from desk.receive_all(d, {"bad": (bad, params), "good": (good, None), "own": (None, None)})
    after = yield from desk.receive(d, (yield from desk.compute(p)))
    return StorySeen({"met": met, **ends, "after": after})


def mute(desk: Desk, p: Actor, d: Actor, other: Actor) -> Steps:
    """Whoever listens where D is sent for one of three requests never answers; another one comes from a peer that D has not met either."""
    bad, ports = yield from borrow(desk, other)
    good = yield from desk.compute(p)
    if not (named := named_in(bad.params, ports)):
        return StorySeen(missing=NO_PORT)
    deaf = Deaf(port := free_port(), speaks_zeromq(min(named)))
    desk.deaf.append(deaf)
    ends = yield from desk.receive_all(
        d, {"bad": (bad, elsewhere(bad.params, ports, port)), "good": (good, None), "own": (None, None)}
    )
    after = yield from desk.receive(d, (yield from desk.compute(p)))
    return StorySeen({**ends, "after": after}, numbers={"heard": len(deaf.heard)})


def stalled(desk: Desk, p: Actor, d: Actor) -> Steps:
    """P stands still while D meets it, and again while D reads from it, and not the third time."""
    requests, numbers = {}, {}
    for what in ("meeting", "reading"):
        handed = yield from desk.compute(p)
        yield from p.stop()
        numbers[f"{what}_from"] = added = time.monotonic()
        request = yield from desk.begin(d, handed)
        own = yield from desk.begin(d, None)
        yield from pause(desk.bench.patience(STALL_S))
        numbers[f"{what}_to"] = time.monotonic()
        p.resume()
        requests[what] = yield from desk.end(d, request, added)
        yield from desk.end(d, own, added)
    numbers["calm_from"] = time.monotonic()
    requests["calm"] = yield from desk.receive(d, (yield from desk.compute(p)))
    numbers["calm_to"] = time.monotonic()
    return StorySeen(requests, numbers=numbers)


def restarted(desk: Desk, p: Actor, d: Actor, stranger: Actor) -> Steps:
    """P ends, and another engine is started on its ports. D has met the old one, and the stranger has met neither."""
    met = yield from desk.receive(d, (yield from desk.compute(p)))
    old, older = (yield from desk.compute(p)), (yield from desk.compute(p))
    p.end()
    new = desk.open("P2b", after="P2")
    yield from new.ask("usage")
    added = time.monotonic()
    one = yield from desk.begin(d, old)
    other = yield from desk.begin(stranger, older)
    ends = {
        "met": met,
        "old": (yield from desk.end(d, one, added)),
        "stranger": (yield from desk.end(stranger, other, added)),
    }
    ends["new"] = yield from desk.receive(d, (yield from desk.compute(new)))
    ends["new_stranger"] = yield from desk.receive(stranger, (yield from desk.compute(new)))
    return StorySeen(ends)


# ---- leases -------------------------------------------------------------------------------------------------------------------


def late(desk: Desk, p: Actor, d: Actor) -> Steps:
    """D comes for a request when its lease is over and P has overwritten its blocks; after that everything is as before."""
    handed = yield from desk.compute(p)
    freed = yield from desk.freed(p, handed, desk.lease_s + desk.limits.release)
    if not freed:
        return StorySeen(handed={"late": handed}, numbers={"freed": 0.0})
    ends = {"late": (yield from desk.receive(d, handed))}
    ends["after"] = yield from desk.receive(d, (yield from desk.compute(p)))
    yield from desk.free(p)
    return StorySeen(ends, {"late": handed}, numbers={"freed": freed})


def overtaken(desk: Desk, p: Actor, d: Actor) -> Steps:
    """D stands still while it loads, until the lease is over and P has overwritten its blocks; then it goes on."""
    yield from desk.receive(d, (yield from desk.compute(p)))
    handed = yield from desk.compute(p)
    held = yield from desk.hold(d, handed, HELD)
    if isinstance(held, str):
        return StorySeen(missing=held)
    yield from d.rest()
    freed = yield from desk.freed(p, handed, 2 * desk.lease_s + desk.limits.release)
    if not freed:
        return StorySeen(handed={"late": handed}, numbers={"freed": 0.0})
    d.resume()
    yield from d.ask("let_go")
    ends = {"late": (yield from desk.end(d, *held))}
    ends["after"] = yield from desk.receive(d, (yield from desk.compute(p)))
    return StorySeen(ends, {"late": handed}, numbers={"freed": freed})


def waiting(desk: Desk, p: Actor, d: Actor) -> Steps:
    """D's request waits for longer than a lease before it is scheduled."""
    yield from until(lambda: d.ends, desk.limits.request)  # D has met P by then; see `loading`
    handed = yield from desk.compute(p)
    p.longest_gap = d.longest_gap = 0.0
    added, request = time.monotonic(), desk.request(handed.number, "d", handed.params)
    yield from d.ask("keep_waiting", request.id)
    yield from d.ask("add", request)
    yield from pause(desk.lease_s * LATER)
    slow = desk.too_slow(p, d)
    yield from d.ask("go_on", request.id)
    ended = yield from desk.end(d, request, added)
    return StorySeen({"waiting": ended}, {"waiting": handed}, slow=slow)


def loading(desk: Desk, p: Actor, d: Actor) -> Steps:
    """D's load takes longer than a lease."""
    yield from desk.receive(d, (yield from desk.compute(p)))
    handed = yield from desk.compute(p)
    p.longest_gap = d.longest_gap = 0.0
    held = yield from desk.hold(d, handed, HELD)
    if isinstance(held, str):
        return StorySeen(missing=held)
    yield from pause(desk.lease_s * LATER)
    slow = desk.too_slow(p, d)
    yield from d.ask("let_go")
    ended = yield from desk.end(d, *held)
    return StorySeen({"loading": ended}, {"loading": handed}, slow=slow)


# ---- nonsense -----------------------------------------------------------------------------------------------------------------


def asked_nonsense(desk: Desk, p: Actor, d: Actor) -> Steps:
    """Whoever is not a peer says a thousand things to the port on which P listens; then somebody who has not met P comes."""
    borrowers = [desk.tellings[name] for name in ("dead", "mute")]
    yield from until(
        lambda: desk.borrowed == len(borrowers) or all(telling.done for telling in borrowers),
        desk.limits.request,
    )
    yield from until(lambda: any(deaf.heard for deaf in desk.deaf), desk.bench.patience(ASKED_S))
    good = [frames for deaf in desk.deaf for frames in deaf.heard[:2]]
    before = yield from desk.compute(p)
    listening = ports_of(p.handle.process.pid)
    sent, ports = 0, sorted(named_in(before.params, listening) or listening)
    for port in ports:
        stranger = Stranger(port)
        stream = questions(good, QUESTIONS // len(ports), seed=len(ports))
        while chunk := list(itertools.islice(stream, CHUNK)):
            sent += sum(stranger.say(frames) for frames in chunk)
            stranger.blurt(b"".join(chunk[0]))
            yield
        yield from pause(desk.bench.patience(HEARD_S))
        stranger.close()
    handed = yield from desk.compute(p)  # now: the lease of what was computed before may be over
    ended = yield from desk.receive(d, handed)
    return StorySeen(
        {"stranger": ended},
        {"stranger": handed},
        numbers={"sent": sent, "ports": len(ports), "learned": len(good)},
    )


# On engines of their own, one after the other: what is held or fails is held or fails for all.
RANK_STORIES = {
    "handed_over": Story(handed_over, RANKS),
    "quiet": Story(quiet, RANKS, after="handed_over"),
    "given_up": Story(given_up, RANKS, after="quiet"),
    "aborted": Story(aborted, RANKS, after="given_up"),
    "failed": Story(failed, RANKS, after="aborted"),
}
# Engines are started in this order. Those that a connector may kill in one story are not those of another one, where that can be helped.
STORIES: dict[str, dict[str, Story]] = {
    "P1D1": {
        "mute": Story(mute, ("P", "D4"), borrows=("P3",), early=True),
        "dead": Story(dead, ("P", "D"), borrows=("P3",), early=True),
        "asked_nonsense": Story(asked_nonsense, ("P3", "D3")),
        "loading": Story(loading, ("P", "D6"), leases=True),
        "waiting": Story(waiting, ("P", "D6"), leases=True),
        "overtaken": Story(overtaken, ("P6", "D5"), leases=True),
        "late": Story(late, ("P6", "D8"), leases=True),
        "stalled": Story(stalled, ("P2", "D2")),
        "restarted": Story(restarted, ("P2", "D2", "D7"), after="stalled"),
        **RANK_STORIES,
    },
    "P1D2": RANK_STORIES,
}
