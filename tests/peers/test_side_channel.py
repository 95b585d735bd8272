"""The hostile clients find ports, replace ports in params, ask nonsense, and listen without an answer."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pytest_kvconform.rigs.cluster.peers import scenarios
from pytest_kvconform.rigs.cluster.peers.hostile_clients import (
    GREETING_S,
    SIGNATURE,
    HostileClient,
    SilentListener,
    listening_ports,
    malformed_messages,
    ports_named_in,
    speaks_zeromq,
    with_port_replaced,
)
from pytest_kvconform.rigs.cluster.peers.scenario_engines import (
    DecodeResult,
    PrefillResult,
    ScenarioObservation,
)
from pytest_kvconform.rigs.cluster.peers.scenarios import OVER_TCP
from pytest_kvconform.rigs.engine.messages import Trace
from pytest_kvconform.rigs.processes import cores
from pytest_kvconform.rigs.processes.ports import free_port


def greets(port: int) -> bool:
    """Whether this process greets on a port as ZeroMQ does, waited for without doing anything else."""
    answers: list[bool] = []

    def listening() -> Iterator[None]:
        answers.append((yield from speaks_zeromq(port, os.getpid())))

    for _ in listening():
        time.sleep(0.01)
    return answers[0]


GOOD = [[b"", msgspec.msgpack.encode(("where", 3, "rank", 0))]]


def test_ports_of_this_process_are_found_and_replaced_in_params() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in (ports := listening_ports(os.getpid()))
        params = {"host": "127.0.0.1", "port": port, "more": {"port": port}, "tokens": 3, "yes": True}
        assert ports_named_in(params, ports) == {port}
        assert with_port_replaced(params, ports, 1) == params | {"port": 1, "more": {"port": 1}}
    assert ports_named_in(params, {1, 3}) == {3}  # not True


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("http://127.0.0.1:8998", "http://127.0.0.1:1"),
        ("http://127.0.0.1:8998/query?of=8998", "http://127.0.0.1:1/query?of=8998"),
        ("[::1]:8998", "[::1]:1"),
        ("tcp://p:8998,tcp://q:8999", "tcp://p:1,tcp://q:8999"),
    ],
)
def test_ports_inside_urls_are_found_and_replaced(text: str, other: str) -> None:
    params = {"remote_bootstrap_addr": text, "all": [text]}
    assert ports_named_in(params, {8998}) == {8998}
    assert ports_named_in(params, {8998}, in_texts=False) == set()
    assert with_port_replaced(params, {8998}, 1) == {"remote_bootstrap_addr": other, "all": [other]}


@pytest.mark.parametrize("text", ["8998", "a:18998", "fe80::8998", "v:8998.5", "a: 8998"])
def test_other_texts_name_no_port(text: str) -> None:
    assert ports_named_in([text], {8998}) == set()


def test_a_thousand_questions_are_nonsense_and_always_the_same() -> None:
    asked = list(malformed_messages(GOOD, 1000, seed=0))
    assert len(asked) == 1000
    assert asked == list(malformed_messages(GOOD, 1000, seed=0))
    assert asked != list(malformed_messages(GOOD, 1000, seed=1))
    assert not any(frames in GOOD for frames in asked)
    assert {len(frames) for frames in asked} >= {1, 2, 3, 9}
    assert max(len(frame) for frames in asked for frame in frames) >= 5000
    assert any(
        frames[-1] == msgspec.msgpack.encode(["where", 2**31, "rank", 1])
        for frames in malformed_messages(GOOD, 5000, seed=0)
    )


def test_valid_messages_may_be_any_bytes() -> None:
    noise = [[random.Random(seed).randbytes(300)] for seed in range(30)]  # some begin as a text of msgpack
    deep = [b"\x91" * 100_000]  # a list in a list, and so on
    assert len(list(malformed_messages([*noise, deep], 2000, seed=0))) == 2000


@pytest.mark.parametrize("zeromq", [True, False])  # ZeroMQ is installed with vLLM
def test_a_listener_listener_hears_and_never_answers(zeromq: bool) -> None:
    port = free_port()
    listener = SilentListener(port, zeromq)
    try:
        assert greets(port) == zeromq
        client = HostileClient(port, zeromq)
        assert client.send([b"", b"hello"])
        deadline = time.monotonic() + 10.0
        while not any(frames[-1] == b"hello" for frames in listener.received):
            listener.receive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        client.close()
    finally:
        listener.close()
    assert not HostileClient(port, greets(port)).send([b"anybody?"])


@pytest.mark.parametrize(("greeting", "zeromq"), [(b"\xff" + bytes(9), True), (b"HTTP", False)])
def test_a_listener_that_greets_late_is_waited_for(greeting: bytes, zeromq: bool) -> None:
    def greet() -> None:
        peer, _ = server.accept()
        time.sleep(0.5)
        peer.sendall(greeting)
        peer.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=greet, daemon=True).start()
        assert greets(server.getsockname()[1]) == zeromq


def test_the_time_in_which_a_listener_waits_for_a_core_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = time.monotonic()  # from now on it waits for nine tenths of the time
    monkeypatch.setattr(cores, "core_waits", lambda pids: {1: {"1": 0.9 * (time.monotonic() - began)}})
    with socket.create_server(("127.0.0.1", 0)) as server:
        peers, answers, rounds = list[socket.socket](), list[bool](), 0

        def listening() -> Iterator[None]:
            answers.append((yield from speaks_zeromq(server.getsockname()[1], os.getpid())))

        for _ in listening():
            rounds += 1
            if not peers and time.monotonic() > began + 2 * GREETING_S:
                peers.append(server.accept()[0])
                peers[0].sendall(SIGNATURE)
            time.sleep(0.01)
        peers[0].close()
    assert answers == [True] and rounds > 10  # others went on meanwhile


class Machine:
    """The engines of a scenario about malformed messages, and a clock.

    `takes`: seconds of each request of a D, in which its processes wait for a core, and whether it loads.
    """

    lease_s = 4.0
    limits = SimpleNamespace(request=30.0)
    bench = SimpleNamespace(scaled_seconds=lambda seconds: 0.0)

    def __init__(self, takes: list[tuple[float, float, bool]]):
        self.takes, self.now, self.waited = takes, 0.0, 0.0
        self.silent_listeners, self.prefills_elsewhere = [SimpleNamespace(received=[[b"", b"valid"]])], 2
        done = SimpleNamespace(done=True)
        self.running = {"unreachable_peer": done, "silent_peer": done}
        self.started, self.asked = list[str](), list[str]()

    def engine(self, name: str) -> Any:
        def call(what: str) -> Iterator[None]:
            yield

        process = SimpleNamespace(pid=os.getpid(), watched=os.getpid())
        return SimpleNamespace(
            name=name,
            handle=SimpleNamespace(process=process),
            deadline=lambda seconds: cores.Deadline(seconds),
            call=call,
        )

    def start(self, name: str) -> Any:
        self.started.append(name)
        return self.engine(name)

    def prefill(self, p: Any) -> Iterator[None]:
        yield
        return PrefillResult("p", 0, {"port": 1}, Trace(id="p", prompt_tokens=55), self.now)

    def decode(self, d: Any, prefill: PrefillResult) -> Iterator[None]:
        yield
        self.asked.append(d.name)
        added, (took, waited, loads) = self.now, self.takes[len(self.asked) - 1]
        self.now, self.waited = self.now + took, self.waited + waited
        trace = Trace(id=d.name, prompt_tokens=55, external_tokens=48 if loads else 0)
        return DecodeResult(d.name, prefill.added, added, self.now, "length", trace, ())


@pytest.mark.parametrize(
    ("takes", "tries"),
    [
        ([(2.0, 1.5, False), (0.4, 0.0, True)], 2),  # no time for a core
        ([(4.5, 0.3, False), (0.4, 0.0, True)], 2),  # the lease was over
        ([(4.5, 0.3, False), (4.5, 4.0, False)], 2),  # once more, and not for ever
        ([(2.0, 0.3, False)], 1),
        ([(4.5, 4.0, True)], 1),
    ],
)
def test_another_d_tries_again_where_a_busy_machine_left_no_time(
    monkeypatch: pytest.MonkeyPatch, takes: list[tuple[float, float, bool]], tries: int
) -> None:
    machine = Machine(takes)
    monkeypatch.setattr(cores, "time", SimpleNamespace(monotonic=lambda: machine.now))
    monkeypatch.setattr(cores, "core_waits", lambda pids: {1: {"1": machine.waited}})
    monkeypatch.setattr(scenarios, "listening_ports", lambda pid: {1})

    def greeted(port: int, pid: int) -> Iterator[None]:
        yield
        return False

    client = SimpleNamespace(send=lambda frames: True, send_raw=lambda sent: None, close=lambda: None)
    monkeypatch.setattr(scenarios, "speaks_zeromq", greeted)
    monkeypatch.setattr(scenarios, "HostileClient", lambda port, zeromq: client)
    engines: Any = machine
    steps = scenarios.garbage_messages(engines, machine.engine("P3"), machine.engine("D3"))
    found = stepped(steps)
    assert machine.asked == ["D3", "D14"][:tries] and machine.started == ["D14"][: tries - 1]
    assert list(found.decodes) == ["stranger", "again"][:tries]
    assert found.numbers["sent"] == 1000 and found.numbers["waited"] == pytest.approx(takes[-1][1])


def test_the_d_that_tries_again_is_like_the_one_before() -> None:
    """P3 and D3 talk over what the connector has; an engine of `OVER_TCP` would not find P there."""
    assert {"P3", "D3", "D14"}.isdisjoint(OVER_TCP)


def stepped(steps: scenarios.Steps) -> ScenarioObservation:
    """Step a scenario to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
