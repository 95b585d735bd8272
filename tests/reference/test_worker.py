"""The worker half: loads, how their end is reported, and failures. Peers live in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from reference_connector import worker as worker_module
from reference_connector.handshake import Listener
from reference_connector.messages import Address, Lease, Orders
from reference_connector.peers import State
from reference_connector.worker import Results
from tests.reference.doubles import BLOCKS, BYTES, PATIENCE_S, TOKENS, Wire, WorkerEngine, until_it_reads


def until(d: WorkerEngine, request: str = "r", steps: list[Results] | None = None) -> Results:
    """Steps of D until a load has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        d.worker.start(Orders())
        found = d.worker.results()
        if steps is not None:
            steps.append(found)
        if request in found.received:
            return found
        time.sleep(0.002)
    raise AssertionError("the load did not end")


def test_a_load_reads_its_tokens_and_nothing_else(make: Callable[..., WorkerEngine]) -> None:
    p, d = make("p", 1), make("d", 0)
    p.pool[:] = np.arange(p.pool.size).reshape(p.pool.shape) % 251
    p.worker.start(Orders(leases={1: "x"}))
    d.worker.start(Orders(loads={"r": p.load(1, [5, 2], [3, 6], tokens=TOKENS + 3)}))
    found = until(d)
    assert not found.failed
    expected = np.zeros_like(d.pool)
    expected[3], expected[6, :12] = p.pool[5], p.pool[2, :12]
    assert (d.pool == expected).all()
    taken = d.worker.stats()
    assert taken["bytes"] == [BYTES + 12] and not taken["failed_loads"]
    assert "r" not in d.worker.results().received, "the end is reported twice"


@pytest.mark.parametrize("zeroed", [True, False])
def test_the_rest_of_new_blocks_is_zeroed_where_vllm_would(
    make: Callable[..., WorkerEngine], zeroed: bool
) -> None:
    p, d = make("p", 7), make("d", 255, zeroed=zeroed)
    d.worker.start(Orders(loads={"r": p.load(1, [5, 2], [3, 6], tokens=TOKENS + 3)}))
    assert not until(d).failed
    expected = np.full_like(d.pool, 255)
    expected[[3, 6]] = 7
    expected[6, 12:] = 0 if zeroed else 255
    assert (d.pool == expected).all()


def test_a_load_is_not_reported_before_its_read_ends(make: Callable[..., WorkerEngine], wire: Wire) -> None:
    p, d = make("p", 7), make("d", 0)
    wire.late = 10
    d.worker.start(Orders(loads={"r": p.load(1, [5], [3], tokens=TOKENS)}))
    until(d)
    assert (d.pool[3] == 7).all()


def test_a_lease_that_has_expired_fails_the_load(make: Callable[..., WorkerEngine]) -> None:
    p, d = make("p", 7, kv_lease_duration=0.01), make("d", 0)
    p.worker.start(Orders(leases={4: "x"}))
    time.sleep(0.05)
    assert p.worker.results().sent == {"x"}
    d.worker.start(Orders(loads={"r": p.load(4, [5, 6], [3, 4])}))
    assert until(d).failed == {"r"}
    assert d.worker.stats()["late_reads"] == 1
    p.worker._leases._seconds = 60.0
    p.worker.start(Orders(leases={5: "y"}))  # the next lease has nothing to do with it
    d.worker.start(Orders(loads={"s": p.load(5, [5, 6], [3, 4])}))
    assert not until(d, "s").failed


def test_a_lease_that_expires_during_the_read_fails_the_load(
    make: Callable[..., WorkerEngine], wire: Wire
) -> None:
    p, d = make("p", 7), make("d", 0)
    p.worker.start(Orders(leases={4: "x"}))
    wire.late = 5
    d.worker.start(Orders(loads={"r": p.load(4, [5, 6], [3, 4])}))
    until_it_reads(d, wire)
    p.worker._leases._end([4])
    p.pool[:] = 9
    assert until(d).failed == {"r"}
    assert d.worker.stats()["late_reads"] == 1


def test_a_load_after_a_release_ends_in_the_step_that_orders_it(
    make: Callable[..., WorkerEngine], wire: Wire
) -> None:
    p, d = make("p", 7), make("d", 0)
    wire.shared = True
    for lease in (1, 2, 3):
        p.worker.start(Orders(leases={lease: "x"}))
        d.worker.start(Orders(loads={"r": p.load(lease, [5, 6], [3, 4])}))
        if lease == 1:  # P and D meet
            until(d)
        else:
            assert d.worker.results().received == {"r"}, "the load waits for a call of P"
        d.worker.start(Orders(releases=[Lease(p.address, lease)]))
        assert d.worker.results().notified and p.worker.results().sent == {"x"}


def test_a_peer_that_stands_still_is_not_read_without_end(
    make: Callable[..., WorkerEngine], wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make("p", 7), make("d", 0)
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    until(d)
    wire.stopped.add("p")
    wire.reads.clear()
    for _ in range(3 * worker_module.MOST_READS):
        d.worker.start(Orders(renewals=[Lease(p.address, 1)]))
        d.worker.results()
    assert len(wire.reads) == worker_module.MOST_READS
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: pytest.fail("close waits"))
    monkeypatch.setattr(worker_module, "time", clock)
    d.worker.close()


def test_notifications_that_waited_for_a_peer_begin_no_more_reads_than_others(
    make: Callable[..., WorkerEngine], wire: Wire
) -> None:
    p, d = make("p", 7), make("d", 0)
    wire.stopped.add("p")
    for _ in range(3 * worker_module.MOST_READS):  # each waits until D has met P
        d.worker.start(Orders(renewals=[Lease(p.address, 1)]))
    deadline = time.monotonic() + PATIENCE_S
    while len(wire.reads) < 3 * worker_module.MOST_READS and time.monotonic() < deadline:
        d.worker.results()  # each reads once before it notifies P
    wire.stopped.clear()
    wire.reads.clear()
    wire.late = 50
    for _ in range(10):
        d.worker.results()
    assert len(wire.reads) == worker_module.MOST_READS


def test_a_failed_read_is_reported_when_it_cannot_write_any_more(
    make: Callable[..., WorkerEngine], wire: Wire
) -> None:
    p, d = make("p", 7), make("d", 0)
    wire.failing, wire.stubborn, steps = 1, 10, []
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    assert until(d, steps=steps).failed == {"r"}
    assert len(steps) >= 5 and wire.reads[0].released
    wire.stubborn = 0
    d.worker.start(Orders(loads={"s": p.load(1, [5, 6], [3, 4])}))
    assert not until(d, "s").failed


def test_a_load_that_took_too_long_is_reported_when_its_read_has_ended(
    make: Callable[..., WorkerEngine], wire: Wire
) -> None:
    p, d = make("p", 7), make("d", 0, transfer_timeout=0.1)
    wire.stopped.add("p")
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    until_it_reads(d, wire)
    deadline = time.monotonic() + 0.4
    while time.monotonic() < deadline:
        assert not d.worker.results().received
        time.sleep(0.002)
    assert wire.reads[0].state == "open" and not wire.reads[0].released
    wire.stopped.clear()
    assert until(d).failed == {"r"}
    assert wire.reads[0].state == "done" and wire.reads[0].released
    d.pool[:] = 0  # the blocks have another owner
    for _ in range(20):
        d.worker.results()
    assert not d.pool.any()


def test_a_load_ends_when_its_peer_dies_while_it_is_stopped(
    make: Callable[..., WorkerEngine], wire: Wire
) -> None:
    p, d = make("p", 7), make("d", 0)
    wire.stopped.add("p")
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    for _ in range(20):
        assert not d.worker.results().received
        time.sleep(0.002)
    wire.inboxes.pop("p")
    wire.stopped.clear()
    assert until(d).failed == {"r"} and not d.pool.any()


def test_no_peer_is_disconnected_while_a_read_from_it_is_in_progress(
    make: Callable[..., WorkerEngine], wire: Wire
) -> None:
    p, d = make("p", 7), make("d", 0, transfer_timeout=0.1)
    wire.stopped.add("p")
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    until_it_reads(d, wire)
    d.worker._peers._peers[p.address].state = State.BROKEN
    d.worker.start(Orders(loads={"other": p.load(2, [5, 6], [1, 2])}))
    assert until(d, "other").failed == {"other"}, "it waits for the peer no longer than its time limit"
    assert not wire.disconnected and wire.reads[0].state == "open"
    wire.stopped.clear()
    assert until(d).failed == {"r"}


def test_a_worker_that_is_closed_waits_for_its_reads(
    make: Callable[..., WorkerEngine], wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make("p", 7), make("d", 0)
    wire.late = 50
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    until_it_reads(d, wire)
    d.worker.close()
    assert wire.reads[0].state == "done" and wire.reads[0].released
    wire.reads.clear()
    d = make("d", 0)
    monkeypatch.setattr(worker_module, "CLOSING_S", 0.1)
    wire.stopped.add("p")
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    until_it_reads(d, wire)
    d.worker.close()
    assert not wire.reads[0].released


def test_a_failure_fails_only_its_own_request(make: Callable[..., WorkerEngine]) -> None:
    p, d, stranger = make("p", 7), make("d", 0), make("q", 0, "another.layer")
    loads = {
        "short": p.load(1, [5], [3, 4]),  # P has fewer tokens than D wants
        "null": p.load(1, [0, 5], [3, 4]),
        "beyond": p.load(1, [5, BLOCKS], [3, 4]),
        "stranger": stranger.load(1, [5, 6], [3, 4]),
        "good": p.load(1, [5, 6], [1, 2]),
    }
    d.worker.start(Orders(loads=loads))
    ended, failed = set[str](), set[str]()
    deadline = time.monotonic() + PATIENCE_S
    while ended != set(loads) and time.monotonic() < deadline:
        found = d.worker.results()
        ended, failed = ended | found.received, failed | found.failed
    assert failed == set(loads) - {"good"} and ended == set(loads)
    assert (d.pool[1:3] == 7).all() and not d.pool[3:].any()


def test_a_peer_that_cannot_be_reached(make: Callable[..., WorkerEngine]) -> None:
    p, d = make("p", 7), make("d", 0, handshake_timeout=0.5)
    orders = Orders(loads={"r": p.load(1, [5, 6], [3, 4])}, releases=[Lease(p.address, 1)])
    p.listener.close()
    d.worker.start(orders)
    found = until(d)
    assert found.failed == {"r"}
    deadline, notified = time.monotonic() + PATIENCE_S, found.notified
    while not notified and time.monotonic() < deadline:
        notified = d.worker.results().notified
    assert notified == {Lease(p.address, 1)}, (
        "a notification that fails is given up, and the engine may stop stepping"
    )
    p.listener = Listener(Address("127.0.0.1", p.listener.port, "p", "p"), [p.worker.published])


def test_p_is_restarted_on_its_port(make: Callable[..., WorkerEngine], wire: Wire) -> None:
    p, d = make("p", 7), make("d", 0)
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    assert not until(d).failed
    old = p.load(2, [5, 6], [3, 4])
    port = p.listener.port
    p.listener.close()
    wire.inboxes.pop("p")  # what was there is gone
    new = make("p, second life", 9)
    new.listener.close()
    new.listener = Listener(Address("127.0.0.1", port, "p", "p, second life"), [new.worker.published])
    d.worker.start(Orders(loads={"old": old, "new": new.load(1, [5, 6], [1, 2])}))
    failed, ended = set[str](), set[str]()
    deadline = time.monotonic() + PATIENCE_S
    while ended != {"old", "new"} and time.monotonic() < deadline:
        found = d.worker.results()
        failed, ended = failed | found.failed, ended | found.received
    assert failed == {"old"} and (d.pool[1:3] == 9).all()
    assert wire.disconnected == ["p"], "the earlier life is disconnected"
    p.listener = Listener(Address("127.0.0.1", 0, "p", "p"), [])
