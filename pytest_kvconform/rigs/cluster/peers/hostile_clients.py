"""Ports on which engines find each other: a silent listener, a proxy that cuts, and malformed messages."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
from collections.abc import Generator, Iterator
from typing import Any

import msgspec

from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.linux import descendants_of, listening_sockets

# First byte that a peer which speaks ZeroMQ's protocol sends (ZMTP 3.1, rfc.zeromq.org/spec/37).
SIGNATURE = b"\xff"
GREETING_S = 1.0  # in which a listener that speaks ZeroMQ greets; usually less than a millisecond
SEND_S = 0.2  # for a connection that carries one message
PASS_S = 2.0  # for a connection to P, and for P or D to take bytes that a proxy passes on
# What vLLM's NIXL connector asks a peer (nixl/base_scheduler.py).
KNOWN = [b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 0))]
_PORT = re.compile(r"(?<=[^\s:]:)[0-9]{1,5}(?![\w.:])")  # of "http://127.0.0.1:8998/query" or "host:8998"
NUMBERS = (-1, 1, 7, 255, 2**31, 2**63 - 1)


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which a process and its descendants listen."""
    return {
        int(address.rpartition(":")[2])
        for process in [pid, *descendants_of(pid)]
        for address in listening_sockets(process)
    }


def ports_named_in(params: Any, ports: set[int], in_texts: bool = True) -> set[int]:
    """Those of the ports that kv_transfer_params name, at whatever depth.

    `in_texts`: also in URLs and addresses, as MooncakeConnector's remote_bootstrap_addr.
    """
    if isinstance(params, dict | list | tuple):
        inner = params.values() if isinstance(params, dict) else params
        return {port for value in inner for port in ports_named_in(value, ports, in_texts)}
    if isinstance(params, str):
        return {int(found[0]) for found in _PORT.finditer(params) if in_texts} & ports
    return {params} & ports if isinstance(params, int) and not isinstance(params, bool) else set()


def with_port_replaced(params: Any, ports: set[int], other: int) -> Any:
    """The same params with another port in place of each of these."""
    if isinstance(params, dict):
        return {key: with_port_replaced(value, ports, other) for key, value in params.items()}
    if isinstance(params, list | tuple):
        return type(params)(with_port_replaced(value, ports, other) for value in params)
    if isinstance(params, str):
        return _PORT.sub(lambda found: str(other) if int(found[0]) in ports else found[0], params)
    return other if ports_named_in(params, ports) else params


class SilentListener:
    """A listener that receives messages and never answers.

    It is a ZeroMQ socket where P's is one, so that peers send at all.
    """

    def __init__(self, port: int, zeromq: bool):
        self.received: list[list[bytes]] = []  # messages, each a list of frames
        self.zeromq = zeromq
        if zeromq:
            import zmq

            self.context = zmq.Context()
            self.router = self.context.socket(zmq.ROUTER)
            self.router.bind(f"tcp://127.0.0.1:{port}")
        else:
            self.listener = socket.create_server(("127.0.0.1", port))
            self.listener.setblocking(False)
            self.peers: list[socket.socket] = []

    def receive(self) -> None:
        """Keep what has arrived since the last call."""
        if self.zeromq:
            import zmq

            with contextlib.suppress(zmq.Again):
                while True:
                    # the first is the sender
                    self.received.append(self.router.recv_multipart(zmq.NOBLOCK)[1:])
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                peer, _ = self.listener.accept()
                peer.setblocking(False)
                self.peers.append(peer)
        for peer in self.peers:
            with contextlib.suppress(OSError):
                if data := peer.recv(1 << 16):
                    self.received.append([data])

    def close(self) -> None:
        if self.zeromq:
            self.context.destroy(linger=0)
            return
        for one in (self.listener, *self.peers):
            one.close()


class CuttingProxy:
    """A proxy in front of P that resets every connection, when so many bytes of P have passed.

    With -1 it resets each connection as soon as it has accepted it. `cut`: connections that it has reset
    then, without those that P or D had ended before.
    """

    def __init__(self, port: int, target: int, after: int):
        self.target, self.after, self.cut = target, after, 0
        self.listener = socket.create_server(("127.0.0.1", port))
        self.listener.setblocking(False)
        self.pairs: list[tuple[socket.socket, socket.socket, list[int]]] = []  # client, P, bytes that passed

    def receive(self) -> None:
        """Pass on what has arrived since the last call, and cut what is due."""
        with contextlib.suppress(BlockingIOError):
            while True:
                client, _ = self.listener.accept()
                try:
                    p = socket.create_connection(("127.0.0.1", self.target), PASS_S)
                except OSError:  # P does not listen any more
                    _reset(client)
                    continue
                for one in (client, p):
                    one.settimeout(0.0)
                self.pairs.append((client, p, [0]))
        for pair in list(self.pairs):
            client, p, passed = pair
            try:
                goes_on = self.after < 0 or (
                    _pass_on(client, p) and _pass_on(p, client, self.after - passed[0], passed)
                )
            except OSError:
                goes_on = False
            due = passed[0] >= self.after
            if due or not goes_on:
                self.cut += due
                self.pairs.remove(pair)
                _reset(client)
                _reset(p)

    def close(self) -> None:
        for one in (self.listener, *(one for client, p, _ in self.pairs for one in (client, p))):
            one.close()


def _pass_on(
    source: socket.socket, target: socket.socket, most: int = 1 << 16, passed: list[int] | None = None
) -> bool:
    """Pass bytes on that have arrived. Returns whether the source goes on."""
    with contextlib.suppress(BlockingIOError):
        while data := source.recv(most):
            target.settimeout(PASS_S)
            target.sendall(data)
            target.settimeout(0.0)
            if passed is not None:
                passed[0] += len(data)
                return True
        return False
    return True


def _reset(one: socket.socket) -> None:
    """Close a connection so that its other end gets a reset (RST), as from a machine that restarts."""
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()


def speaks_zeromq(port: int, pid: int) -> Generator[None, None, bool]:
    """Whether the process that listens on a port, or a thread of it, greets as ZeroMQ does.

    ZeroMQ greets whoever connects, and at once; others may wait until they are asked. Yields until something
    came, or for GREETING_S in which the process and this one did not wait for a core.
    """
    try:
        peer = socket.create_connection(("127.0.0.1", port), PASS_S)
    except OSError:
        return False
    with peer:
        peer.setblocking(False)
        deadline = Deadline(GREETING_S, (os.getpid(), pid), look=True)
        while not deadline.over():
            try:
                return peer.recv(1) == SIGNATURE
            except BlockingIOError:
                yield
            except OSError:
                return False
    return False


def malformed_messages(valid: list[list[bytes]], count: int, seed: int) -> Iterator[list[bytes]]:
    """Random bytes, valid messages that are cut or changed, too few and too many frames."""
    choose = random.Random(seed)
    seeds = [*valid, KNOWN]
    while count:
        frames = list(choose.choice(seeds))
        at, kind = choose.randrange(len(frames)), count % 6
        if kind == 0:
            frames[-1] = choose.randbytes(choose.choice((0, 1, 3, 17, 300, 5000)))
        elif kind == 1:
            frames[-1] = frames[-1][: choose.randrange(len(frames[-1]) or 1)]
        elif kind == 2:
            changed = bytearray(frames[-1] or b"\0")
            changed[choose.randrange(len(changed))] ^= 1 << choose.randrange(8)
            frames[-1] = bytes(changed)
        elif kind == 3:
            frames[-1] = _renumbered(frames[-1], choose)
        elif kind == 4:
            more = [choose.randbytes(choose.randrange(40)) for _ in range(choose.randrange(4))]
            frames = frames[:at] + more + frames[at:]
        else:
            frames = [frames[-1]] * choose.choice((1, 3, 9))
        if frames not in seeds:
            count -= 1
            yield frames


def _renumbered(message: bytes, choose: random.Random) -> bytes:
    """A valid message with other numbers, such as a rank that does not exist.

    A message without numbers gets a huge length.
    """
    try:
        words = msgspec.msgpack.decode(message)
    except (ValueError, RecursionError):
        words = None  # peers may use any format; what is no msgpack has no numbers that could be changed
    if isinstance(words, list) and any(isinstance(word, int) for word in words):
        return msgspec.msgpack.encode(
            [choose.choice(NUMBERS) if isinstance(word, int) else word for word in words]
        )
    return b"\xdd" + struct.pack(">I", 2**32 - 1) + message  # msgpack: a list of four thousand million


class HostileClient:
    """A client that sends messages to a listener and waits for no answer.

    It sends ZeroMQ messages where the listener speaks ZeroMQ, and raw bytes.
    """

    def __init__(self, port: int, zeromq: bool):
        self.port, self.dealer = port, None
        if zeromq:
            import zmq

            self.context = zmq.Context()
            self.dealer = self.context.socket(zmq.DEALER)
            self.dealer.setsockopt(zmq.SNDHWM, 0)  # messages that the listener does not take are kept here
            self.dealer.connect(f"tcp://127.0.0.1:{port}")

    def send(self, frames: list[bytes]) -> bool:
        """Send one message. Returns whether a process listens."""
        if self.dealer is not None:
            self.dealer.send_multipart(frames)
            return True
        return self.send_raw(b"".join(frames))

    def send_raw(self, data: bytes) -> bool:
        """Send bytes on a connection of their own. Returns whether a process listens."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), SEND_S) as peer:
                peer.sendall(data)
            return True
        except OSError:
            return False

    def close(self) -> None:
        if self.dealer is not None:
            self.context.destroy(linger=0)
