"""The side channel: D's workers ask P's scheduler for P's ranks. One handshake for all ranks, once per peer.

    D                                            P
    Ask        which engine, random number  -->
                                            <--  Challenge  random number
    Proof      HMAC of both numbers         -->
                                            <--  Sealed     Answer, and an HMAC of both numbers and of it

The HMACs are made with the key of the deployment (trust/authentication.py); without one the key is empty. So
nobody without the key learns what NIXL needs to read P's memory, and D gives NIXL no metadata of others.

No message can end the listener. It answers with a Refusal what it does not understand, and a question for
another engine: P was restarted at the same address. A refusal tells nothing about the engine that is there.
"""

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from reference_connector import messages
from reference_connector.messages import VERSION, Address, BadMessage, Challenge, Proof, Rank, Refusal, Sealed
from reference_connector.trust.authentication import ANYBODY, Trust
from reference_connector.trust.identity import difference

encode, decode = messages.encode, messages.decode
logger = logging.getLogger("vllm.reference_connector.handshake")
LONGEST_QUESTION = 1 << 16  # bytes; ZeroMQ drops longer ones unread
LONGEST_ANSWER = 1 << 26
RANDOM = 32  # bytes
CHALLENGES = 1024  # that wait for a proof; P forgets the oldest of more
WAKE_MS = 100  # how often the listener checks whether it has to end


class HandshakeError(Exception):
    """A peer cannot be reached, or is not the engine that was asked for. The message is one sentence."""


class Listener:
    """Answers handshakes of one engine in its own thread, until `close`. OSError if it cannot listen."""

    def __init__(self, me: Address, ranks: Sequence[Rank], trust: Trust = ANYBODY):
        """Port 0 of `me` is any free one: `port` tells which."""
        self._engine, self._trust = (me.engine, me.incarnation), trust
        self._answer = encode(messages.Answer(list(ranks), dict(trust.identity)))
        self._challenged: dict[bytes, tuple[Any, ...]] = {}  # connection -> what its proof must be about
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_QUESTION)
        self._socket.setsockopt(zmq.IPV6, int(":" in me.host))
        try:
            self._socket.bind(f"tcp://{_bracketed(me.host)}:{me.port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"the side channel cannot listen: {me}: {error}") from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="reference-connector-listener", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                if self._socket.poll(WAKE_MS):
                    peer, *frames = self._socket.recv_multipart()
                    self._socket.send_multipart([peer, b"", self.reply(frames[-1] if frames else b"", peer)])
            except zmq.ZMQError as error:  # the peer is gone
                logger.warning("the side channel could not answer: %s", error)

    def reply(self, question: bytes, peer: bytes = b"") -> bytes:
        """The answer to a question from a connection, whatever bytes it is."""
        try:
            ask = decode(question, messages.Ask | Proof)
        except BadMessage as error:
            return encode(Refusal(f"this is not a question of the side channel: {error}"))
        return encode(self._seal(ask, peer) if isinstance(ask, Proof) else self._challenge(ask, peer))

    def _challenge(self, ask: messages.Ask, peer: bytes) -> Challenge | Refusal:
        if ask.version != VERSION:
            return Refusal(f"this engine has version {VERSION} of the protocol, and not {ask.version}")
        if (ask.engine, ask.incarnation) != self._engine:
            logger.warning("a peer asks for another engine than this one, %s", self._engine[0])
            return Refusal("the engine that was asked for is not here")
        random = secrets.token_bytes(RANDOM)
        self._challenged[peer] = (ask.engine, ask.incarnation, ask.random, random)
        if len(self._challenged) > CHALLENGES:
            del self._challenged[next(iter(self._challenged))]
        return Challenge(random)

    def _seal(self, proof: Proof, peer: bytes) -> Sealed | Refusal:
        about = self._challenged.pop(peer, None)  # each challenge serves once
        if about is None or not self._trust.fits(proof.mac, "question", *about):
            return Refusal("the key of this deployment is another one, or the proof is too late")
        return Sealed(self._answer, self._trust.mac("answer", *about, self._answer))

    def close(self) -> None:
        """End the thread and release the port."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


def fetch(peer: Address, timeout: float, trust: Trust = ANYBODY) -> tuple[Rank, ...]:
    """Ask an engine for all its ranks, for at most `timeout` seconds. Raises HandshakeError."""
    deadline, random = time.monotonic() + timeout, secrets.token_bytes(RANDOM)
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, max(1, int(1000 * timeout)))  # a peer may end the session itself
        socket.setsockopt(zmq.IPV6, int(":" in peer.host))
        socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_ANSWER)

        def ask(question: Any, kind: Any) -> Any:
            socket.send(encode(question))
            if not socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                raise HandshakeError(f"{peer} did not answer within {timeout:g} s")
            reply = decode(socket.recv(), kind | Refusal, LONGEST_ANSWER)
            if isinstance(reply, Refusal):
                raise HandshakeError(f"{peer} refused: {messages.escaped(reply.sentence)}")
            return reply

        try:
            socket.connect(f"tcp://{_bracketed(peer.host)}:{peer.port}")
            challenge = ask(messages.Ask(VERSION, peer.engine, peer.incarnation, random), Challenge)
            about = (peer.engine, peer.incarnation, random, challenge.random)
            sealed = ask(Proof(trust.mac("question", *about)), Sealed)
            if not trust.fits(sealed.mac, "answer", *about, sealed.answer):
                raise HandshakeError(f"{peer} did not prove the key")
            answer = decode(sealed.answer, messages.Answer, LONGEST_ANSWER)
        except (zmq.ZMQError, BadMessage) as error:
            raise HandshakeError(f"{peer}: {error}") from None
    if different := difference(trust.identity, answer.identity, trust.may_differ):
        raise HandshakeError(f"{peer} has other KV: {different} (option allow_different)")
    return tuple(answer.ranks)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
