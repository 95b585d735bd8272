"""The hostile clients find ports, replace ports in params, ask nonsense, and listen without an answer."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from pytest_kvconform.rigs.peers.hostile_clients import (
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
