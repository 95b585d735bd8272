"""The side channel: D's workers ask P's scheduler for P's workers. One question for all ranks, once per peer.

No message can end the listener. It answers with a Refusal if a message is not a question, if the question
has another version of the protocol, or if it is for another engine. By the last one D notices that P was
restarted at the same address.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import zmq

from reference_connector.messages import (
    VERSION,
    Address,
    Answer,
    Ask,
    BadMessage,
    Card,
    Refusal,
    decode,
    encode,
)

logger = logging.getLogger("vllm.reference_connector.handshake")
LONGEST_QUESTION = 1 << 16  # bytes; ZeroMQ drops longer ones unread
WAKE_MS = 100  # how often the listener checks whether it has to end


class HandshakeError(Exception):
    """A peer cannot be reached, or is not the engine that was asked for. The message is one sentence."""


class Listener:
    """Answers handshakes of one engine in its own thread, until `close`. OSError if it cannot listen."""

    def __init__(self, host: str, port: int, engine: str, incarnation: str, cards: Sequence[Card]):
        """`port`: 0 for any free one; `cards`: of every rank."""
        self._engine, self._incarnation = engine, incarnation
        self._answer = encode(Answer(list(cards)))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_QUESTION)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        try:
            self._socket.bind(f"tcp://{_bracketed(host)}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"the side channel cannot listen on {host}:{port}: {error}") from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="reference-connector-listener", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                if self._socket.poll(WAKE_MS):
                    peer, *frames = self._socket.recv_multipart()
                    self._socket.send_multipart([peer, b"", self.reply(frames[-1] if frames else b"")])
            except zmq.ZMQError as error:  # the peer is gone
                logger.warning("the side channel could not answer: %s", error)

    def reply(self, question: bytes) -> bytes:
        """The answer to a question, whatever bytes it is."""
        try:
            ask = decode(question, Ask)
        except BadMessage as error:
            return encode(Refusal(f"this is not a question of the side channel: {error}"))
        if ask.version != VERSION:
            sentence = f"this engine has version {VERSION} of the protocol, the question has {ask.version}"
            return encode(Refusal(sentence))
        if (ask.engine, ask.incarnation) != (self._engine, self._incarnation):
            asked, here = f"{ask.engine} ({ask.incarnation})", f"{self._engine} ({self._incarnation})"
            return encode(Refusal(f"engine {asked} is not here, but {here}"))
        return self._answer

    def close(self) -> None:
        """End the thread and release the port."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


def fetch(peer: Address, timeout: float) -> tuple[Card, ...]:
    """Ask an engine for the cards of all its ranks, for at most `timeout` seconds. Raises HandshakeError."""
    where = f"{peer.engine} at {peer.host}:{peer.port}"
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int(":" in peer.host))
        try:
            socket.connect(f"tcp://{_bracketed(peer.host)}:{peer.port}")
            socket.send(encode(Ask(VERSION, peer.engine, peer.incarnation)))
            if not socket.poll(int(1000 * timeout)):
                raise HandshakeError(f"{where} did not answer within {timeout:g} s")
            reply = decode(socket.recv(), Answer | Refusal)
        except (zmq.ZMQError, BadMessage) as error:
            raise HandshakeError(f"{where}: {error}") from None
    if isinstance(reply, Refusal):
        raise HandshakeError(f"{where} refused: {reply.sentence}")
    return tuple(reply.cards)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
