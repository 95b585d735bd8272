"""What a transport does with a read whose peer stands still, dies or is disconnected: a measurement.

`measure` runs on NIXL and on the tests' double of it. Run as a program, this module measures NIXL: it prints
one JSON object. UCX reads its variables when it is loaded, so the program runs in a process of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from reference_connector.plan import Runs
from reference_connector.transport import HOST, Memory, Transport, TransportError

BYTES = 4 << 20
SOON_S = 0.3  # in which nothing happens on a peer that stands still
PATIENCE_S = 20.0
OTHER = 0xAA  # what the next owner writes into the memory of a read


class Peer(Protocol):
    """A process from whose memory a transport reads."""

    name: str  # the transport's
    address: int

    def stop(self) -> None: ...
    def go_on(self) -> None: ...
    def die(self) -> None: ...


class Reader:
    """A transport, its memory, and one peer that it has met and read from once."""

    def __init__(self, transport: Transport, memory: np.ndarray, peer: Peer):
        self.transport, self.memory, self.peer = transport, memory, peer
        first = self.prepare()
        transport.begin(first)
        self.wait(lambda: transport.done(first))
        transport.release(first)
        memory[:] = 0

    def prepare(self) -> Any:
        runs = Runs(*np.array([[self.memory.ctypes.data], [self.peer.address], [len(self.memory)]]))
        return self.transport.prepare(self.peer.name, runs, HOST, HOST)

    def begin(self) -> Any:
        """Begin a read from a peer that stands still."""
        self.peer.stop()
        self.transport.begin(handle := self.prepare())
        return handle

    def wait(self, test: Callable[[], Any], seconds: float = PATIENCE_S) -> bool:
        """Let the transport work until a test is true, or for some time. Returns whether it became true."""
        deadline = time.monotonic() + seconds
        while not test():
            if time.monotonic() > deadline:
                return False
            self.transport.notifications()
            time.sleep(0.002)
        return True

    def state(self, handle: Any) -> str:
        try:
            return "DONE" if self.transport.done(handle) else "PROC"
        except TransportError:
            return "ERR"

    def overwrites(self, seconds: float = PATIENCE_S) -> bool:
        """Whether the transport writes in this time, when the memory has another owner."""
        self.memory[:] = OTHER
        self.peer.go_on()
        return self.wait(lambda: (self.memory != OTHER).any(), seconds)


def works(act: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a call raises no TransportError."""
    try:
        act(*arguments)
    except TransportError:
        return False
    return True


def released(d: Reader) -> dict[str, Any]:
    """A read that is in progress is released."""
    handle = d.begin()
    found = {"before": d.state(handle), "release": d.transport.release(handle), "after": d.state(handle)}
    return found | {"release again": d.transport.release(handle), "goes on writing": d.overwrites()}


def disconnected(d: Reader) -> dict[str, Any]:
    """The peer of a read that is in progress is disconnected."""
    handle = d.begin()
    found = {"disconnect": works(d.transport.disconnect, d.peer.name), "after": d.state(handle)}
    return found | {"goes on writing": d.overwrites(), "prepare": works(d.prepare)}


def stopped(d: Reader) -> dict[str, Any]:
    """The peer stands still, and goes on."""
    handle = d.begin()
    ended = d.wait(lambda: d.state(handle) != "PROC", SOON_S)
    again = works(d.transport.begin, handle)
    d.peer.go_on()
    d.wait(lambda: d.state(handle) != "PROC")
    return {"ends": ended, "begin again": again, "after": d.state(handle), "reads": bool(d.memory.all())}


def died(d: Reader) -> dict[str, Any]:
    """The peer stands still, and its process is killed."""
    handle = d.begin()
    d.wait(lambda: False, SOON_S)
    before = d.state(handle)
    d.peer.die()
    d.wait(lambda: d.state(handle) != "PROC")
    found = {"before": before, "after": d.state(handle), "goes on writing": d.overwrites(SOON_S)}
    found |= {"release": d.transport.release(handle), "prepare": works(d.prepare)}
    found |= {"begin": works(lambda: d.transport.begin(d.prepare()))}
    found |= {"notify": works(d.transport.notify, d.peer.name, b"x")}
    found |= {"disconnect": works(d.transport.disconnect, d.peer.name)}
    return found | {"prepare after": works(d.prepare), "notify after": works(d.transport.notify, "x", b"x")}


def not_begun(d: Reader) -> dict[str, Any]:
    """A read is released before it has begun."""
    handle = d.prepare()
    return {"before": d.state(handle), "release": d.transport.release(handle)}


def closed(d: Reader) -> dict[str, Any]:
    """The transport is closed while a read is in progress."""
    handle = d.begin()
    d.transport.release(handle)
    del handle
    d.transport.close()
    d.memory[:] = OTHER
    d.peer.go_on()
    time.sleep(SOON_S)
    return {"goes on writing": bool((d.memory != OTHER).any())}


def notified(d: Reader) -> dict[str, Any]:
    """Reads from a peer that stands still, in the end after a read that followed a notification."""
    found = {"at first": d.state(d.begin())}
    d.peer.go_on()
    d.transport.notify(d.peer.name, b"x")
    found["after a notification"] = d.state(handle := d.begin())
    d.peer.go_on()
    d.wait(lambda: d.state(handle) != "PROC")
    return found | {"after a read": d.state(d.begin())}


SHARED = (notified,)  # over shared memory, the others over TCP
SCENARIOS = (released, disconnected, stopped, died, not_begun, closed)


class Process:
    """A process with a NIXL agent and memory full of sevens."""

    def __init__(self) -> None:
        """Start it. No agent may be in this process yet: the new one would share its sockets."""
        ours, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        self.metadata, self.address = ours.recv()
        self.name = ""

    def stop(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGSTOP)

    def go_on(self) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGCONT)

    def die(self) -> None:
        self.process.kill()
        self.process.join()


def _agent() -> tuple[Transport, np.ndarray]:
    agent, memory = Transport(["UCX"], 0, False), np.full(BYTES, 7, np.uint8)
    agent.register([Memory(memory.ctypes.data, memory.nbytes)])
    return agent, memory


def _serve(connection: Any) -> None:
    agent, memory = _agent()
    connection.send((agent.metadata(), memory.ctypes.data))
    while not connection.poll(0.001):
        agent.notifications()


def main() -> None:
    """Measure NIXL, each scenario in a process of its own: some end the peer's process."""
    import vllm.distributed.nixl_utils  # noqa: F401  (before the first fork, as this takes seconds)

    for scenario in SHARED if "sm" in os.environ["UCX_TLS"] else SCENARIOS:
        if not os.fork():
            process = Process()
            agent, memory = _agent()
            process.name = agent.connect(process.metadata)
            print(json.dumps({scenario.__name__: scenario(Reader(agent, memory, process))}), flush=True)
            process.die()
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main()
