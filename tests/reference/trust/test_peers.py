"""Peers of a worker of D: what it does with those that do not answer, and how many it remembers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reference_connector import peers as peers_module
from reference_connector.handshake import HandshakeError
from reference_connector.messages import Address, Handoff, Rank
from reference_connector.peers import Peers, State
from tests.reference.doubles import PATIENCE_S, Local, Wire, box, request, scheduler, tables

BOX = box(np.zeros((10, 64), dtype=np.uint8))
RANKS = (Rank(b"agent", ("DRAM", 0), 8192, (BOX,)),)


@pytest.fixture
def peers(wire: Wire) -> Iterator[Callable[[Any], Peers]]:
    made: list[Peers] = []

    def with_fetch(fetch: Any) -> Peers:
        made.append(Peers((BOX,), 0, 1, Local(wire, "d"), fetch))
        return made[-1]

    yield with_fetch
    for one in made:
        one.close()


def meet(peers: Peers, address: Address) -> Any:
    """The peer, or why it was not met."""
    task = peers.meet(address, time.monotonic() + PATIENCE_S)
    while True:
        try:
            next(task)
        except StopIteration as end:
            return end.value
        except HandshakeError as error:
            return str(error)
        time.sleep(0.001)


def address(number: int) -> Address:
    return Address("127.0.0.1", 1 + number, "p", f"life {number}")


def test_each_failed_handshake_doubles_the_pause(
    peers: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, now = list[Address](), [1000.0]

    def fetch(there: Address) -> Any:
        asked.append(there)
        if len(asked) < 9:
            raise HandshakeError("nobody there")
        return RANKS

    known = peers(fetch)
    monkeypatch.setattr(peers_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pauses = []
    for _ in range(8):
        assert meet(known, address(0)) == "nobody there"
        assert meet(known, address(0)) == "nobody there"
        pauses.append(known.missed.pop(address(0)))
        now[0] += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60] and len(asked) == 8
    assert meet(known, address(0)).state is State.MET
    assert not known.missed


def test_peers_that_do_not_answer_hold_up_no_other(peers: Callable[..., Peers]) -> None:
    silent = threading.Event()

    def fetch(there: Address) -> Any:
        if there.port > 1:
            silent.wait(PATIENCE_S)
            raise HandshakeError("nobody there")
        return RANKS

    known = peers(fetch)
    waiting = [known.meet(address(number), time.monotonic() + PATIENCE_S) for number in range(1, 17)]
    for task in waiting:
        next(task)
    try:
        assert meet(known, address(0)).state is State.MET
    finally:
        silent.set()


def test_a_worker_remembers_so_many_peers(
    peers: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "PEERS", 8)

    def fetch(there: Address) -> Any:
        if there.port % 2:
            raise HandshakeError("nobody there")
        return RANKS

    known = peers(fetch)
    read_from = meet(known, address(1))
    read_from.reads = 1
    for number in range(2, 40):
        meet(known, address(number))
    assert len(known._peers) <= 8, "D remembers every peer"
    assert known._peers[address(1)] is read_from, "it is read from"


def test_d_s_scheduler_asks_a_peer_nothing_that_does_not_answer() -> None:
    p, d = scheduler(), scheduler()
    _, params = p.request_finished(request("r-p", 40, {"do_remote_decode": True}), ([1, 2, 3],))
    lease = Handoff.read(params).lease
    r, again = request("r", 40, params), request("again", 40, params)
    d.on_new_request(r)
    d.on_worker_report(set(), {lease.peer: 1000.0})
    assert d.get_num_new_matched_tokens(r, 0) == (0, False), "D asks a peer that does not answer"
    d.update_state_after_alloc(r, tables("nnn"), 0)
    assert d.take_orders().releases == [lease], "P keeps nothing for it"
    d.on_new_request(again)
    d.on_worker_report(set(), {lease.peer: 0.0})
    assert d.get_num_new_matched_tokens(again, 0) == (39, True), "the pause is over"
