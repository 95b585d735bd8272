"""The side channel: whatever arrives, the next question is answered."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from reference_connector.handshake import HandshakeError, Listener, fetch
from reference_connector.messages import (
    VERSION,
    Address,
    Answer,
    Ask,
    Challenge,
    Rank,
    Refusal,
    decode,
    encode,
)
from tests.reference.doubles import box

BOX = box(np.zeros((10, 64), dtype=np.uint8))
RANKS = tuple(Rank(b"agent", ("DRAM", device), 8192, (BOX,)) for device in range(2))
PATIENCE_S = 20.0


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(Address("127.0.0.1", 0, "p", "first life"), RANKS)
    yield made
    made.close()


def address(listener: Listener, incarnation: str = "first life", engine: str = "p") -> Address:
    return Address("127.0.0.1", listener.port, engine, incarnation)


def malformed(seed: int, count: int) -> Iterator[list[bytes]]:
    """Frames of messages: noise, msgpack of anything, questions that are cut off or changed."""
    r = random.Random(seed)
    ask = encode(Ask(VERSION, "p", "first life", b"random"))
    values = [
        None,
        1,
        "x",
        [],
        {},
        {"type": "Ask"},
        {"type": "Ask", "version": "1"},
        {"type": "Answer"},
        ["Ask", 1],
        2**63,
        b"\xff",
        {1: 2},
    ]
    for _ in range(count):
        match r.randrange(6):
            case 0:
                yield [r.randbytes(r.randrange(200))]
            case 1:
                yield [encode(r.choice(values))]
            case 2:
                yield [ask[: r.randrange(len(ask))]]
            case 3:
                at = r.randrange(len(ask))
                yield [ask[:at] + bytes([ask[at] ^ (1 << r.randrange(8))]) + ask[at + 1 :]]
            case 4:
                yield [r.randbytes(3) for _ in range(r.randrange(1, 6))]
            case _:
                yield [b"", b"\x91" * r.randrange(1, 3000)]  # lists in lists


def test_a_thousand_messages_that_are_none(listener: Listener) -> None:
    refused = sum(
        isinstance(decode(listener.reply(frames[-1]), Challenge | Refusal), Refusal)
        for frames in malformed(seed=20, count=1000)
    )
    assert refused > 980  # a bit more or less in the name of a field is forgiven
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{listener.port}")
        for frames in malformed(seed=21, count=1000):
            dealer.send_multipart(frames)
        for _ in range(1000):
            assert dealer.poll(PATIENCE_S * 1000), "a message was not answered"
            dealer.recv_multipart()
    with socket.create_connection(("127.0.0.1", listener.port)) as raw:
        raw.sendall(random.Random(22).randbytes(10000))
    assert fetch(address(listener), PATIENCE_S) == RANKS


def test_a_message_that_is_too_long_is_not_read(listener: Listener) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{listener.port}")
        dealer.send_multipart([b"", bytes(1 << 20)])
        assert fetch(address(listener), PATIENCE_S) == RANKS


@pytest.mark.parametrize(("incarnation", "engine"), [("second life", "p"), ("first life", "q")])
def test_another_engine_behind_the_same_port_is_noticed(
    listener: Listener, incarnation: str, engine: str
) -> None:
    with pytest.raises(HandshakeError, match=r"refused: the engine that was asked for is not here$"):
        fetch(address(listener, incarnation, engine), PATIENCE_S)


def test_another_version_is_refused_in_a_sentence(listener: Listener) -> None:
    reply = decode(listener.reply(encode(Ask(VERSION + 1, "p", "first life", b"random"))), Refusal)
    assert isinstance(reply, Refusal) and f"has version {VERSION}" in reply.sentence


def test_nobody_there() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # it accepts connections and never answers
        started = time.monotonic()
        with pytest.raises(HandshakeError, match="did not answer within"):
            fetch(Address("127.0.0.1", silent.getsockname()[1], "p", "first life"), 0.3)
        assert time.monotonic() - started < PATIENCE_S


@pytest.mark.parametrize("host", ["", "no such host", "127.0.0.1;x", "*", "tcp://127.0.0.1"])
def test_a_host_that_is_none(host: str) -> None:
    with pytest.raises(HandshakeError):
        fetch(Address(host, 4321, "p", "first life"), 0.3)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc1 not msgpack",
        encode(Answer([])),
        encode({"type": "Answer", "ranks": ["no rank"]}),
        encode({"type": "Answer"}),
    ],
)
def test_answers_that_are_none(listener: Listener, answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "reply", lambda question, peer: answer)
    with pytest.raises(HandshakeError):
        fetch(address(listener), PATIENCE_S)


def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:  # a machine without IPv6
        with pytest.raises(OSError, match="cannot listen"):
            Listener(Address("::1", 0, "p", "first life"), RANKS)
        return
    made = Listener(Address("::1", 0, "p", "first life"), RANKS)
    assert fetch(Address("::1", made.port, "p", "first life"), PATIENCE_S) == RANKS
    made.close()


def test_the_port_is_free_again() -> None:
    first = Listener(Address("127.0.0.1", 0, "p", "first life"), [])
    with pytest.raises(OSError, match="cannot listen"):
        Listener(Address("127.0.0.1", first.port, "p", "second life"), [])
    first.close()
    again = Listener(Address("127.0.0.1", first.port, "p", "second life"), [])
    again.close()


def test_what_a_peer_writes_into_a_log_is_escaped_and_short(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = encode(Refusal("it is\n2026-11-24 ERROR \x1b[31m" + "x" * 900))
    monkeypatch.setattr(listener, "reply", lambda question, peer: words)
    with pytest.raises(HandshakeError, match=r"refused: it is\\n2026-11-24 ERROR \\x1b\[31mx+$") as raised:
        fetch(address(listener), PATIENCE_S)
    assert len(str(raised.value)) < 500 and str(raised.value).isprintable()
    with pytest.raises(HandshakeError) as raised:
        fetch(Address("127.0.0.1", listener.port, "p\n" + "e" * 1000, "first life"), PATIENCE_S)
    assert len(str(raised.value)) < 1000 and str(raised.value).isprintable()
