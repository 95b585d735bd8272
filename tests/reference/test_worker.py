"""The worker half: what it reads, when it says so, and what it does when something goes wrong. Peers live in this process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from reference_connector import worker as worker_module
from reference_connector.handshake import Listener
from reference_connector.messages import (
    ANSWER,
    ANSWERS,
    LEDGER,
    Address,
    Handoff,
    Lease,
    Leases,
    Load,
    Orders,
    Part,
    Query,
    encode,
)
from reference_connector.options import Options
from reference_connector.transport import Memory
from reference_connector.worker import Results, Worker
from tests.reference.doubles import Local, Wire, box

PATIENCE_S = 20.0
BLOCKS, BYTES, TOKENS = 8, 64, 16


class Engine:
    """One rank with a pool of uint8 [block, byte], and the side channel of its engine."""

    def __init__(self, wire: Wire, name: str, fill: int, layer: str = "layers.0", **options: float | bool):
        self.pool = np.full((BLOCKS, BYTES), fill, dtype=np.uint8)
        memory = Memory(self.pool.ctypes.data, self.pool.nbytes, view=self.view)
        settings = Options(**{"handshake_timeout": 0.5, **options})
        self.name, self.worker = (
            name,
            Worker(settings, 0, 1, Local(wire, name), (box(self.pool, layer),), [memory]),
        )
        self.listener = Listener("127.0.0.1", 0, "p", name, [self.worker.card])

    def view(self, start: int, count: int) -> np.ndarray:
        return self.pool.reshape(-1)[start : start + count]

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.listener.port, "p", self.name)

    def load(self, lease: int, remote: list[int], local: list[int], tokens: int = 2 * TOKENS) -> Load:
        """An order for another engine to load from this one."""
        handoff = Handoff(
            do_remote_prefill=True,
            remote_engine_id="p",
            remote_incarnation=self.name,
            remote_request_id="x",
            remote_host="127.0.0.1",
            remote_port=self.listener.port,
            remote_lease=lease,
            remote_num_tokens=tokens,
            remote_block_ids=[remote],
            remote_first_tokens=[0],
        )
        return Load(handoff, [Part(0, tokens, local, 0)])

    def close(self) -> None:
        self.listener.close()
        self.worker.close()


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def make(wire: Wire) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def engine(*args: object, **kwargs: object) -> Engine:
        made.append(Engine(wire, *args, **kwargs))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def until(d: Engine, request: str = "r", steps: list[Results] | None = None) -> Results:
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


def test_a_load_reads_its_tokens_and_nothing_else(make: Callable[..., Engine]) -> None:
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
    assert "r" not in d.worker.results().received, "said twice"


def test_a_load_is_not_said_to_be_done_before_it_is(make: Callable[..., Engine], wire: Wire) -> None:
    p, d = make("p", 7), make("d", 0)
    wire.late = 10
    d.worker.start(Orders(loads={"r": p.load(1, [5], [3], tokens=TOKENS)}))
    until(d)
    assert (d.pool[3] == 7).all()


def test_a_lease_that_is_over_fails_the_load(make: Callable[..., Engine]) -> None:
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


def test_a_lease_that_ends_under_the_read_fails_it(make: Callable[..., Engine], wire: Wire) -> None:
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
    make: Callable[..., Engine], wire: Wire
) -> None:
    p, d = make("p", 7), make("d", 0)
    wire.failing, wire.stubborn, steps = 1, 10, []
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    assert until(d, steps=steps).failed == {"r"}
    assert len(steps) >= 5 and wire.reads[0].state == "released"
    wire.stubborn = 0
    d.worker.start(Orders(loads={"s": p.load(1, [5, 6], [3, 4])}))
    assert not until(d, "s").failed


def test_a_read_without_end_is_given_up(make: Callable[..., Engine], wire: Wire) -> None:
    p, d = make("p", 7), make("d", 0, transfer_timeout=0.2)
    wire.late = 10**9
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    assert until(d).failed == {"r"}
    assert wire.reads[0].state == "released"


def test_failures_stay_with_their_request(make: Callable[..., Engine]) -> None:
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


def test_nobody_there(make: Callable[..., Engine]) -> None:
    p, d = make("p", 7), make("d", 0)
    orders = Orders(loads={"r": p.load(1, [5, 6], [3, 4])}, releases=[Lease(p.address, 1)])
    p.listener.close()
    d.worker.start(orders)
    found = until(d)
    assert found.failed == {"r"}
    deadline, told = time.monotonic() + PATIENCE_S, found.notified
    while not told and time.monotonic() < deadline:
        told = d.worker.results().notified
    assert told == {Lease(p.address, 1)}, "what cannot be said is given up, and the engine may rest"
    p.listener = Listener("127.0.0.1", p.listener.port, "p", "p", [p.worker.card])


def test_p_ends_each_lease_once(make: Callable[..., Engine]) -> None:
    p, d = make("p", 7), make("d", 0)
    p.worker.start(Orders(leases={1: "x", 2: "y"}))
    for sent in ({"x"}, set()):
        d.worker.start(Orders(releases=[Lease(p.address, 1)]))
        while not d.worker.results().notified:
            pass
        assert p.worker.results().sent == sent


def test_d_can_be_faster_than_p_s_own_scheduler(make: Callable[..., Engine]) -> None:
    p, d = make("p", 7), make("d", 0)
    d.worker.start(Orders(releases=[Lease(p.address, 3)]))
    while not d.worker.results().notified:
        pass
    assert p.worker.results().sent == set()
    p.worker.start(Orders(leases={3: "x"}))
    assert p.worker.results().sent == {"x"}


def test_leases_are_prolonged(make: Callable[..., Engine]) -> None:
    p, d = make("p", 7, kv_lease_duration=0.6), make("d", 0)
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


def test_notifications_that_are_none(make: Callable[..., Engine], wire: Wire) -> None:
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


def test_p_is_started_anew_on_its_port(make: Callable[..., Engine], wire: Wire) -> None:
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
    assert wire.parted == ["p"], "what has ended is forgotten"
    p.listener = Listener("127.0.0.1", 0, "p", "p", [])


def test_with_integrity_p_is_asked_what_it_has(make: Callable[..., Engine], wire: Wire) -> None:
    p, d = make("p", 7), make("d", 0, integrity=True)
    for request, spoil in (("right", False), ("wrong", True)):
        wire.reads.clear()
        d.worker.start(Orders(loads={request: p.load(1, [5, 6], [3, 4])}))
        deadline, found = time.monotonic() + PATIENCE_S, Results()
        while request not in found.received and time.monotonic() < deadline:
            if spoil and wire.reads and wire.reads[0].state == "released":
                d.pool[4, 5] ^= 1
                spoil = False
            found = d.worker.results()
            p.worker.start(Orders())
        assert (request in found.received, request in found.failed) == (True, request == "wrong")


def integrity_load(p: Engine, d: Engine, seconds: float = PATIENCE_S) -> Results:
    """Steps of both until a load has ended."""
    d.worker.start(Orders(loads={"r": p.load(1, [5, 6], [3, 4])}))
    deadline, found = time.monotonic() + seconds, Results()
    while "r" not in found.received and time.monotonic() < deadline:
        found = d.worker.results()
        p.worker.start(Orders())
        time.sleep(0.001)
    return found


def test_a_question_that_was_lost_is_asked_again(
    make: Callable[..., Engine], wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make("p", 7), make("d", 0, integrity=True)
    monkeypatch.setattr(worker_module, "ASK_AGAIN_S", 0.05)
    said, notify = list[bytes](), d.worker._transport.notify

    def lossy(peer: str, message: bytes) -> None:
        said.append(message)
        if len(said) > 2:
            notify(peer, message)

    monkeypatch.setattr(d.worker._transport, "notify", lossy)
    found = integrity_load(p, d)
    assert found.received == {"r"} and not found.failed
    assert len(said) >= 3 and len(set(said)) == 1
    assert not wire.inboxes["d"], "P answers on its board, and has no connection to who asks"


def test_where_p_has_no_answer_the_load_fails_at_once(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
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


def test_nobody_learns_of_memory_that_is_not_kv(make: Callable[..., Engine], wire: Wire) -> None:
    p = make("p", 7)
    board = p.worker._board[LEDGER:].reshape(ANSWERS, ANSWER)
    at, size = p.pool.ctypes.data, p.pool.nbytes
    for ticket, where in enumerate([(at - 1, 2), (at, size + 1), (0, 8), (at, -8), (at, 8, 8)], 1):
        wire.inboxes["p"].append(encode(Query(ticket, np.array(where).tobytes())))
    wire.inboxes["p"] += [encode(Query(6, b"odd")), encode(Query(7, np.array([at, 8]).tobytes()))]
    p.worker.start(Orders())
    assert board[1:8, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert not board[1:7, 1:].any() and board[7, 1:3].all()


def test_whatever_ends_a_message_the_engine_may_rest(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make("p", 7), make("d", 0)
    logged = list[str]()
    monkeypatch.setattr(
        worker_module.logger, "error", lambda text, *args, **kwargs: logged.append(text % args)
    )

    def notify(peer: str, message: bytes) -> None:
        raise ZeroDivisionError("nobody has foreseen this")

    monkeypatch.setattr(d.worker._transport, "notify", notify)
    d.worker.start(Orders(releases=[Lease(p.address, 3)], renewals=[Lease(p.address, 4)]))
    deadline, told = time.monotonic() + PATIENCE_S, set[Lease]()
    while not told and time.monotonic() < deadline:
        told = d.worker.results().notified
    assert told == {Lease(p.address, 3)}
    assert any("nobody has foreseen this" in line for line in logged)


def test_a_message_goes_out_although_its_sender_rests_afterwards(
    make: Callable[..., Engine], wire: Wire
) -> None:
    p, d = make("p", 7), make("d", 0)
    p.worker.start(Orders(leases={1: "x"}))
    wire.late = 5
    d.worker.start(Orders(renewals=[Lease(p.address, 1)]))
    d.worker.start(Orders(releases=[Lease(p.address, 1)]))  # while the first read of this peer is under way
    while not d.worker.results().notified:
        pass
    assert p.worker.results().sent == {"x"}


def test_nobody_parts_from_a_peer_of_which_a_message_reads(make: Callable[..., Engine], wire: Wire) -> None:
    p, d = make("p", 7), make("d", 0)
    p.worker.start(Orders(leases={1: "x", 2: "y"}))
    wire.late = 1 << 30
    d.worker.start(Orders(renewals=[Lease(p.address, 1)]))
    while not wire.reads:
        d.worker.results()
    d.worker._peers._met[p.address].failed = True
    d.worker.start(Orders(releases=[Lease(p.address, 2)]))
    for _ in range(10):
        assert not d.worker.results().notified
    assert not wire.parted and wire.reads[0].state == "open"
    wire.reads[0].left = wire.late = 0
    while not d.worker.results().notified:
        pass
    assert wire.parted == ["p"] and p.worker.results().sent == {"y"}


def test_one_message_a_peer_and_step(make: Callable[..., Engine], wire: Wire) -> None:
    p, q, d = make("p", 7), make("q", 7), make("d", 0)
    orders = Orders(
        releases=[Lease(p.address, 1), Lease(q.address, 2), Lease(p.address, 3)],
        renewals=[Lease(q.address, 4)],
    )
    d.worker.start(orders)
    told = set[Lease]()
    while len(told) < 3:
        told |= d.worker.results().notified
    assert list(wire.inboxes["p"]) == [encode(Leases([1, 3], []))]
    assert list(wire.inboxes["q"]) == [encode(Leases([2], [4]))]
