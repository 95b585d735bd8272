"""The worker half: loads, how their end is reported, and failures. Peers live in this process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import pytest

from reference_connector import worker as worker_module
from reference_connector.handshake import Listener
from reference_connector.messages import (
    ANSWER,
    ANSWERS,
    LEDGER,
    Lease,
    Orders,
    Query,
    encode,
)
from reference_connector.worker import Results
from tests.reference.doubles import BLOCKS, BYTES, PATIENCE_S, TOKENS, Wire, WorkerEngine


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
    while not wire.reads:
        d.worker.advance()
    p.worker._end(4)
    p.pool[:] = 9
    assert until(d).failed == {"r"}
    assert d.worker.stats()["late_reads"] == 1


def test_a_failed_read_is_reported_when_it_cannot_write_any_more(
    make: Callable[..., WorkerEngine], wire: Wire
) -> None:
    p, d = make("p", 7), make("d", 0)
    wire.failing, wire.stubborn, steps = 1, 10, []
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    assert until(d, steps=steps).failed == {"r"}
    assert len(steps) >= 5 and wire.reads[0].state == "released"
    wire.stubborn = 0
    d.worker.start(Orders(loads={"s": p.load(1, [5, 6], [3, 4])}))
    assert not until(d, "s").failed


def test_a_read_that_never_ends_is_cancelled(make: Callable[..., WorkerEngine], wire: Wire) -> None:
    p, d = make("p", 7), make("d", 0, transfer_timeout=0.2)
    wire.late = 10**9
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    assert until(d).failed == {"r"}
    assert wire.reads[0].state == "released"


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
    p, d = make("p", 7), make("d", 0)
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
    p.listener = Listener("127.0.0.1", p.listener.port, "p", "p", [p.worker.card])


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
    new.listener = Listener("127.0.0.1", port, "p", "p, second life", [new.worker.card])
    d.worker.start(Orders(loads={"old": old, "new": new.load(1, [5, 6], [1, 2])}))
    failed, ended = set[str](), set[str]()
    deadline = time.monotonic() + PATIENCE_S
    while ended != {"old", "new"} and time.monotonic() < deadline:
        found = d.worker.results()
        failed, ended = failed | found.failed, ended | found.received
    assert failed == {"old"} and (d.pool[1:3] == 9).all()
    assert wire.disconnected == ["p"], "the earlier life is disconnected"
    p.listener = Listener("127.0.0.1", 0, "p", "p", [])


def test_integrity_compares_the_digest_of_p(make: Callable[..., WorkerEngine], wire: Wire) -> None:
    p, d = make("p", 7), make("d", 0, integrity=True)
    for request, corrupt in (("right", False), ("wrong", True)):
        wire.reads.clear()
        d.worker.start(Orders(loads={request: p.load(1, [5, 6], [3, 4])}))
        deadline, found = time.monotonic() + PATIENCE_S, Results()
        while request not in found.received and time.monotonic() < deadline:
            if corrupt and wire.reads and wire.reads[0].state == "released":
                d.pool[4, 5] ^= 1
                corrupt = False
            found = d.worker.results()
            p.worker.start(Orders())
        assert (request in found.received, request in found.failed) == (True, request == "wrong")


def integrity_load(p: WorkerEngine, d: WorkerEngine, seconds: float = PATIENCE_S) -> Results:
    """Steps of both until a load has ended."""
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    deadline, found = time.monotonic() + seconds, Results()
    while "r" not in found.received and time.monotonic() < deadline:
        found = d.worker.results()
        p.worker.start(Orders())
        time.sleep(0.001)
    return found


def test_a_query_that_was_lost_is_repeated(
    make: Callable[..., WorkerEngine], wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make("p", 7), make("d", 0, integrity=True)
    monkeypatch.setattr(worker_module, "ASK_AGAIN_S", 0.05)
    sent, notify = list[bytes](), d.worker._transport.notify

    def lossy(peer: str, message: bytes) -> None:
        sent.append(message)
        if len(sent) > 2:
            notify(peer, message)

    monkeypatch.setattr(d.worker._transport, "notify", lossy)
    found = integrity_load(p, d)
    assert found.received == {"r"} and not found.failed
    assert len(sent) >= 3 and len(set(sent)) == 1
    assert not wire.inboxes["d"], "P answers on its board and sends nothing"


def test_without_a_digest_of_p_the_load_fails_at_once(
    make: Callable[..., WorkerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make("p", 7), make("d", 0, integrity=True)

    def view(start: int, count: int) -> np.ndarray:
        raise RuntimeError("no copy to host memory")

    p.worker._memory = (dataclasses.replace(p.worker._memory[0], view=view),)
    found = integrity_load(p, d)
    assert found.failed == {"r"}
    p.worker.start(Orders(leases={9: "x"}))  # and P goes on
    d.worker.start(Orders(releases=[Lease(p.address, 9)]))
    while not d.worker.results().notified:
        pass
    assert p.worker.results().sent == {"x"}


def test_p_sends_no_digest_of_memory_that_is_not_kv(make: Callable[..., WorkerEngine], wire: Wire) -> None:
    p = make("p", 7)
    board = p.worker._board[LEDGER:].reshape(ANSWERS, ANSWER)
    at, size = p.pool.ctypes.data, p.pool.nbytes
    for ticket, where in enumerate([(at - 1, 2), (at, size + 1), (0, 8), (at, -8), (at, 8, 8)], 1):
        wire.inboxes["p"].append(encode(Query(ticket, np.array(where).tobytes())))
    wire.inboxes["p"] += [encode(Query(6, b"odd")), encode(Query(7, np.array([at, 8]).tobytes()))]
    p.worker.start(Orders())
    assert board[1:8, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert not board[1:7, 1:].any() and board[7, 1:3].all()
