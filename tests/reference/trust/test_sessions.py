"""D's half of a handshake with a peer that ends the session."""

from __future__ import annotations

import socket
import threading
import time

from reference_connector.handshake import HandshakeError, fetch
from reference_connector.messages import Address, Challenge, encode
from reference_connector.trust.authentication import Trust

KEY = Trust(b"k" * 32)


def frame(flags: int, body: bytes) -> bytes:
    """A frame of ZMTP (RFC 23): flags 1: more follow, 4: a command."""
    return bytes([flags, len(body)]) + body


def end_session(listening: socket.socket, ended: threading.Event) -> None:
    """A peer that sends a challenge, and after it what is no frame: libzmq ends the session."""
    with listening.accept()[0] as peer:
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        peer.sendall(frame(4, b"\x05READY\x0bSocket-Type" + (3).to_bytes(4, "big") + b"REP"))
        peer.recv(64, socket.MSG_WAITALL)
        peer.recv(4096)
        time.sleep(0.2)  # the question comes
        peer.sendall(frame(1, b"") + frame(0, encode(Challenge(bytes(32)))) + b"\xff" * 32)
        ended.wait(20.0)


def test_d_waits_for_no_peer_that_ends_the_session() -> None:
    """Several times: libzmq may end it before or after D sends its proof."""
    for _ in range(5):
        ended, found = threading.Event(), list[str]()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            there = Address("127.0.0.1", listening.getsockname()[1], "p", "first life")

            def ask(there: Address = there, found: list[str] = found) -> None:
                try:
                    fetch(there, 0.5, KEY)
                except HandshakeError as error:
                    found.append(str(error))

            threads = [
                threading.Thread(target=end_session, args=(listening, ended), daemon=True),
                threading.Thread(target=ask, daemon=True),
            ]
            for thread in threads:
                thread.start()
            threads[1].join(10.0)
            ended.set()
            threads[0].join(10.0)
        assert found, "D still waits"
