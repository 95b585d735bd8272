"""The worker half: leases of P, and the notifications that end and renew them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest

from reference_connector import scheduler as scheduler_module
from reference_connector import worker as worker_module
from reference_connector.leases import EARLY, RANDOM_BITS, GivenLeases, entry_of, new_number
from reference_connector.messages import (
    LEDGER,
    Lease,
    Leases,
    Orders,
    encode,
)
from reference_connector.peers import State
from tests.reference.doubles import PATIENCE_S, Wire, WorkerEngine, request, scheduler, until_it_reads


def test_p_ends_each_lease_once(make: Callable[..., WorkerEngine]) -> None:
    p, d = make("p", 7), make("d", 0)
    p.worker.start(Orders(leases={1: "x", 2: "y"}))
    for sent in ({"x"}, set()):
        d.worker.start(Orders(releases=[Lease(p.address, 1)]))
        while not d.worker.results().notified:
            pass
        assert p.worker.results().sent == sent


def test_a_release_may_arrive_before_the_order_of_p_s_scheduler(make: Callable[..., WorkerEngine]) -> None:
    p, d = make("p", 7), make("d", 0)
    d.worker.start(Orders(releases=[Lease(p.address, 3)]))
    while not d.worker.results().notified:
        pass
    assert p.worker.results().sent == set()
    p.worker.start(Orders(leases={3: "x"}))
    assert p.worker.results().sent == {"x"}


def test_renewed_leases_do_not_expire(make: Callable[..., WorkerEngine], wire: Wire) -> None:
    p, d = make("p", 7, kv_lease_duration=0.6), make("d", 0)
    d.worker.start(Orders(renewals=[Lease(p.address, 9)]))
    until_it_reads(d, wire)
    p.worker.start(Orders(leases={1: "kept", 2: "left"}))
    sent: set[str] = set()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        d.worker.start(Orders(renewals=[Lease(p.address, 1)]))
        sent |= p.worker.results().sent
        time.sleep(0.02)
    assert sent == {"left"}
    deadline = time.monotonic() + PATIENCE_S
    while "kept" not in sent and time.monotonic() < deadline:
        sent |= p.worker.results().sent
    assert "kept" in sent


def test_d_renews_as_often_as_the_lease_of_p_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a D whose own leases are longer, and whose option asks for less."""
    now = [1000.0]
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    p, d = scheduler(), scheduler(heartbeat=1000.0)  # P's leases are of 30 s
    _, params = p.request_finished(request("r-p", 40, {"do_remote_decode": True}), ([1, 2, 3],))
    d.on_new_request(request("r", 40, params))
    renewed = []
    for _ in range(30):
        renewed += [now[0]] * len(d.take_orders().renewals)
        now[0] += 1.0
    assert [b - a for a, b in pairwise(renewed)] == [5.0] * 5, "a sixth of P's lease"
    _, longer = p.request_finished(request("s-p", 40, {"do_remote_decode": True}), ([1, 2, 3],))
    d.on_new_request(request("s", 40, longer | {"remote_lease_duration": 600.0}))
    d.request_finished(request("r", 40, params), ([1, 2, 3],))
    renewed = []
    for _ in range(310):
        renewed += [now[0]] * len(d.take_orders().renewals)
        now[0] += 1.0
    assert [b - a for a, b in pairwise(renewed)] == [100.0] * 2, "nobody needs the shorter lease any more"


def test_notifications_of_other_formats_are_ignored(make: Callable[..., WorkerEngine], wire: Wire) -> None:
    p = make("p", 7)
    p.worker.start(Orders(leases={1: "x"}))
    wire.inboxes["p"].extend(
        [
            b"",
            b"\xc1",
            b"HB:1,2",
            encode({"type": "Leases", "released": "1"}),
            encode({"type": "Leases", "renewed": [None]}),
            b"\x91" * 5000,
        ]
    )
    p.worker.start(Orders())
    assert p.worker.results().sent == set()


def test_after_any_error_of_a_notification_the_engine_may_stop_stepping(
    make: Callable[..., WorkerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make("p", 7), make("d", 0)
    logged = list[str]()
    monkeypatch.setattr(
        worker_module.logger, "error", lambda text, *args, **kwargs: logged.append(text % args)
    )

    def notify(peer: str, message: bytes) -> None:
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr(d.worker._transport, "notify", notify)
    d.worker.start(Orders(releases=[Lease(p.address, 3)], renewals=[Lease(p.address, 4)]))
    deadline, notified = time.monotonic() + PATIENCE_S, set[Lease]()
    while not notified and time.monotonic() < deadline:
        notified = d.worker.results().notified
    assert notified == {Lease(p.address, 3)}
    assert any("unforeseen" in line for line in logged)


def test_a_notification_is_sent_although_the_engine_stops_stepping(
    make: Callable[..., WorkerEngine], wire: Wire
) -> None:
    p, d = make("p", 7), make("d", 0)
    p.worker.start(Orders(leases={1: "x"}))
    wire.late = 5
    d.worker.start(Orders(renewals=[Lease(p.address, 1)]))
    # while the first read from this peer is in progress
    d.worker.start(Orders(releases=[Lease(p.address, 1)]))
    while not d.worker.results().notified:
        pass
    assert p.worker.results().sent == {"x"}


def test_a_peer_stays_connected_while_a_notification_reads_from_it(
    make: Callable[..., WorkerEngine], wire: Wire
) -> None:
    p, d = make("p", 7), make("d", 0)
    p.worker.start(Orders(leases={1: "x", 2: "y"}))
    wire.late = 1 << 30
    d.worker.start(Orders(renewals=[Lease(p.address, 1)]))
    until_it_reads(d, wire)
    d.worker._peers._peers[p.address].state = State.BROKEN
    d.worker.start(Orders(releases=[Lease(p.address, 2)]))
    for _ in range(10):
        assert not d.worker.results().notified
    assert not wire.disconnected and wire.reads[0].state == "open"
    wire.reads[0].left = wire.late = 0
    while not d.worker.results().notified:
        pass
    assert wire.disconnected == ["p"] and p.worker.results().sent == {"y"}


def test_one_notification_for_each_peer_and_step(make: Callable[..., WorkerEngine], wire: Wire) -> None:
    p, q, d = make("p", 7), make("q", 7), make("d", 0)
    orders = Orders(
        releases=[Lease(p.address, 1), Lease(q.address, 2), Lease(p.address, 3)],
        renewals=[Lease(q.address, 4)],
    )
    d.worker.start(orders)
    notified = set[Lease]()
    while len(notified) < 3:
        notified |= d.worker.results().notified
    assert list(wire.inboxes["p"]) == [encode(Leases([1, 3], []))]
    assert list(wire.inboxes["q"]) == [encode(Leases([2], [4]))]


def test_the_ledger_never_goes_back() -> None:
    """Two leases share an entry, and the earlier one ends later: D must see that the later one has ended."""
    given = GivenLeases(30.0)
    early, late = new_number(5), new_number(5 + LEDGER)
    assert entry_of(early) == entry_of(late)
    given.give({early: "early", late: "late"})
    assert given.on_notice(Leases(released=[late])) == {"late"}
    assert given.on_notice(Leases(released=[early])) == {"early"}
    assert given.ledger[entry_of(late)] == late, "D would take the later lease for a valid one"


def test_a_peer_cannot_end_leases_that_it_was_not_handed() -> None:
    given = GivenLeases(30.0)
    first = 7 << RANDOM_BITS
    given.on_notice(Leases(released=list(range(first, first + EARLY))))
    assert given.give({first + EARLY + 1: "one"}) == set()
    given = GivenLeases(30.0)
    given.on_notice(Leases(released=[place << RANDOM_BITS for place in range(8, 2000)]))
    leases = {new_number(place): "another" for place in range(8, 2000)}
    assert given.give(leases) == set(), "leases ended that no peer was handed"


def test_releases_before_the_order_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given, now = GivenLeases(30.0), time.monotonic()
    given.on_notice(Leases(released=[new_number(place) for place in range(1, EARLY + 1)]))
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    given.expire()
    given.on_notice(Leases(released=[number := new_number(9)]))
    assert given.give({number: "x"}) == {"x"}


def test_no_notification_holds_a_step_of_p(make: Callable[..., WorkerEngine], wire: Wire) -> None:
    p = make("p", 7)
    for first, last in ((1, 400_000), (1_000_000, 1_065_000)):  # the first one is too long to be read
        wire.inboxes["p"].append(encode(Leases(released=list(range(first, last)))))
    began = time.thread_time()
    p.worker.start(Orders())
    took, early = time.thread_time() - began, p.worker._leases._early
    assert min(early) == 1_000_000, "a message that is too long was decoded"
    assert len(early) == EARLY and took < 0.1 and not wire.inboxes["p"]
