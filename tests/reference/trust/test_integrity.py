"""The option integrity: P's digest of the bytes that D read, and queries that must not hold P's steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import pytest

from reference_connector import integrity
from reference_connector import worker as worker_module
from reference_connector.messages import (
    ANSWER,
    ANSWERS,
    LEDGER,
    Lease,
    Leases,
    Orders,
    Query,
    encode,
)
from reference_connector.worker import Results
from tests.reference.doubles import PATIENCE_S, Wire, WorkerEngine


def test_integrity_compares_the_digest_of_p(make: Callable[..., WorkerEngine], wire: Wire) -> None:
    p, d = make("p", 7, integrity=True), make("d", 0, integrity=True)
    for request, corrupt in (("right", False), ("wrong", True)):
        wire.reads.clear()
        d.worker.start(Orders(loads={request: p.load(1, [5, 6], [3, 4])}))
        deadline, found = time.monotonic() + PATIENCE_S, Results()
        while request not in found.received and time.monotonic() < deadline:
            if corrupt and wire.reads and wire.reads[0].released:
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
    p, d = make("p", 7, integrity=True), make("d", 0, integrity=True)
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
    p, d = make("p", 7, integrity=True), make("d", 0, integrity=True)

    def view(start: int, count: int) -> np.ndarray:
        raise RuntimeError("no copy to host memory")

    p.worker._digests.memory = (dataclasses.replace(p.worker._memory[0], view=view),)
    found = integrity_load(p, d)
    assert found.failed == {"r"}
    p.worker.start(Orders(leases={9: "x"}))  # and P goes on
    d.worker.start(Orders(releases=[Lease(p.address, 9)]))
    while not d.worker.results().notified:
        pass
    assert p.worker.results().sent == {"x"}


def test_p_sends_no_digest_of_memory_that_is_not_kv(make: Callable[..., WorkerEngine], wire: Wire) -> None:
    p = make("p", 7, integrity=True)
    board = p.worker._board[LEDGER:].reshape(ANSWERS, ANSWER)
    at, size = p.pool.ctypes.data, p.pool.nbytes
    for ticket, where in enumerate([(at - 1, 2), (at, size + 1), (0, 8), (at, -8), (at, 8, 8)], 1):
        wire.inboxes["p"].append(encode(Query(ticket, np.array(where).tobytes())))
    wire.inboxes["p"] += [encode(Query(6, b"odd")), encode(Query(7, np.array([at, 8]).tobytes()))]
    for _ in range(7):
        p.worker.start(Orders())
    assert board[1:8, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert not board[1:7, 1:].any() and board[7, 1:3].all()


def longest_step(worker: object, done: Callable[[], bool]) -> float:
    """Seconds of the longest step until `done`."""
    longest, deadline = 0.0, time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        began = time.thread_time()
        worker.start(Orders())
        longest = max(longest, time.thread_time() - began)
    return longest


def test_no_notification_holds_a_step_of_p(make: Callable[..., WorkerEngine], wire: Wire) -> None:
    p, off = make("p", 7, integrity=True), make("off", 7)
    for engine in (p, off):
        board = engine.worker._board[LEDGER:].reshape(ANSWERS, ANSWER)
        at, inbox = engine.pool.ctypes.data, wire.inboxes[engine.name]
        inbox.append(encode(Query(1, np.array([[at] * 200000, [512] * 200000]).tobytes())))  # 3.2 MB
        inbox.append(encode(Query(2, np.array([[at] * 30000, [512] * 30000]).tobytes())))
        inbox.append(encode(Query(3, np.array([[at] * 30000, [0] * 30000]).tobytes())))
        inbox.append(encode(Leases(released=list(range(1, 400000)))))
        inbox.append(encode(Query(4, np.array([at, 8]).tobytes())))
        assert longest_step(engine.worker, lambda board=board: board[4, 0] == 4) < 0.05
        assert board[1:5, 0].tolist() == [0, 2, 3, 4], "the first one is too long to be read"
        assert not board[2, 1:].any(), "it asks for more bytes than there are"
        assert board[3:5, 1:3].all() == (engine is p), "only the option lets P answer"


def test_a_digest_takes_as_many_steps_as_it_needs(
    make: Callable[..., WorkerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make("p", 7, integrity=True), make("d", 0, integrity=True)
    monkeypatch.setattr(integrity, "STEP_S", 0)
    monkeypatch.setattr(integrity, "SLICE", 8)
    monkeypatch.setattr(integrity, "RUNS", 1)  # a query for each run
    found = integrity_load(p, d)
    assert found.received == {"r"} and not found.failed


def test_a_p_without_the_option_fails_the_load_at_once(make: Callable[..., WorkerEngine]) -> None:
    p, d = make("p", 7), make("d", 0, integrity=True)
    assert integrity_load(p, d).failed == {"r"}
