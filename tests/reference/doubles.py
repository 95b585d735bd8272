"""Test doubles: what vLLM hands to the scheduler half, a transport within one process, and engines on it."""

from __future__ import annotations

import ctypes
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from reference_connector.boxes import Axis, Box
from reference_connector.handshake import Listener
from reference_connector.messages import Address, GroupLoad, Handoff, Load
from reference_connector.options import Options
from reference_connector.plan import Runs
from reference_connector.scheduler import Group, Scheduler
from reference_connector.transport import Memory, TransportError
from reference_connector.trust.authentication import ANYBODY, Trust
from reference_connector.worker import Worker

PATIENCE_S = 20.0
BLOCKS, BYTES, TOKENS = 8, 64, 16
ADDRESS = {
    "remote_engine_id": "p",
    "remote_incarnation": "first life",
    "remote_host": "127.0.0.1",
    "remote_port": 4321,
}
FULL, WINDOW, STATE = Group(16), Group(16, window=32), Group(64, state=True, scratch=1)


def scheduler(*groups: Group, heartbeat: float = 1000.0, caching: bool = True) -> Scheduler:
    options = Options(heartbeat_interval=heartbeat)
    return Scheduler(groups or (FULL,), dict(ADDRESS), lookahead=0, caching=caching, options=options)


def request(name: str, tokens: int, params: Any, status: str = "FINISHED_LENGTH_CAPPED") -> Any:
    """What the scheduler half looks at in a vllm.v1.request.Request."""
    ids = list(range(tokens))
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        num_prompt_tokens=tokens,
        num_computed_tokens=tokens,
        prompt_token_ids=ids,
        prompt_embeds=None,
        _all_token_ids=list(ids),
        max_tokens=16,
        status=SimpleNamespace(name=status),
        get_skip_reading_prefix_cache=lambda: False,
    )


def tables(*groups: str) -> Any:
    """KVCacheBlocks.blocks, a word for each group; ids count from 1.

    "h" is a block of the prefix cache, "0" the null block, "n" a new block.
    """

    def block(index: int, what: str) -> Any:
        return SimpleNamespace(
            block_id=0 if what == "0" else index, is_null=what == "0", block_hash=b"" if what == "h" else None
        )

    return tuple([block(i, what) for i, what in enumerate(word, 1)] for word in groups)


@dataclass
class Wire:
    """What connects the transports of a test, and its mishaps."""

    inboxes: dict[str, deque[bytes]] = field(default_factory=dict)
    late: int = 0  # rounds of the reader's agent before a read moves anything
    failing: int = 0  # so many of the next reads fail
    stubborn: int = 0  # so often a read that has failed refuses its release, as NIXL's API allows
    stopped: set[str] = field(default_factory=set)  # peers whose process is stopped
    # Reads go over shared memory: each ends in the call that begins it, unless it has to wait for a call of
    # the peer. The first read after a notification does.
    shared: bool = False
    calls: Counter[str] = field(default_factory=Counter)  # of peers, in which they make progress
    reads: list[Copy] = field(default_factory=list)
    disconnected: list[str] = field(default_factory=list)  # peers that were disconnected


@dataclass
class Copy:
    """A read: memmove, some rounds after it was begun."""

    wire: Wire
    peer: str
    runs: list[tuple[int, int, int]]
    left: int = 0
    after: int = 0  # with `shared`: the call of the peer for which it waits
    fails: bool = False
    stubborn: int = 0
    state: str = "new"  # then "open", and at last "done" or "failed"
    released: bool = False
    disconnected: bool = False

    def advance(self) -> None:
        """One round of the reader's agent, which serves reads that were released or disconnected, too."""
        waits = self.wire.calls[self.peer] < self.after
        if self.state != "open" or waits or (self.peer in self.wire.stopped and not self.wire.shared):
            return
        self.left -= 1
        if self.fails or self.peer not in self.wire.inboxes:
            self.state = "failed"
        elif self.left < 0:
            for local, remote, length in self.runs:
                ctypes.memmove(local, remote, length)
            self.state = "done"


class Local:
    """A Transport (reference_connector/transport.py) whose peers live in this process.

    Its answers are those of the real one over UCX, and test_nixl.py compares the two.
    """

    def __init__(self, wire: Wire, name: str):
        self.wire, self.name = wire, name
        # by a read; NIXL sends the first message only when its sender makes further calls
        self.reached: set[str] = set()
        self.connected: set[str] = set()
        self.own: list[Copy] = []
        self.notified: set[str] = set()  # peers from which no read has begun since
        self.after: dict[str, int] = {}  # peer -> its call for which reads wait
        wire.inboxes[name] = deque()

    def register(self, memory: Any) -> None:
        self.memory = list(memory)

    def metadata(self) -> bytes:
        return self.name.encode()

    def connect(self, metadata: bytes) -> str:
        self.connected.add(peer := metadata.decode())
        return peer

    def disconnect(self, peer: str) -> None:
        self.connected.discard(peer)
        self.wire.disconnected.append(peer)
        for copy in self.own:
            copy.disconnected |= copy.peer == peer

    def prepare(self, peer: str, runs: Runs, here: Any, there: Any) -> Copy:
        if peer not in self.connected:
            raise TransportError(f"{peer} is not connected")
        return Copy(
            self.wire,
            peer,
            list(zip(runs.local.tolist(), runs.remote.tolist(), runs.length.tolist(), strict=True)),
        )

    def begin(self, handle: Copy) -> None:
        if handle.state == "open":
            raise TransportError("the read is in progress")
        handle.state = "failed"
        if handle.peer not in self.wire.inboxes and handle.peer not in self.wire.stopped:
            raise TransportError(f"{handle.peer} is gone")
        handle.left, handle.state = self.wire.late, "open"
        handle.fails, handle.stubborn = self.wire.failing > 0, self.wire.stubborn
        self.wire.failing -= handle.fails
        self.wire.reads.append(handle)
        self.own.append(handle)
        if self.wire.shared:
            if handle.peer in self.notified:
                self.after[handle.peer] = self.wire.calls[handle.peer] + 1
            self.notified.discard(handle.peer)
            handle.after = self.after.get(handle.peer, 0)
            handle.advance()

    def done(self, handle: Copy) -> bool:
        if handle.state == "new":
            raise TransportError("the read has not begun")
        if handle.released:
            return True
        self._advance()
        if handle.disconnected or handle.state == "failed":
            raise TransportError("it failed")
        if handle.state == "done":
            self.reached.add(handle.peer)
        return handle.state == "done"

    def _advance(self) -> None:
        for copy in self.own:
            copy.advance()

    def release(self, handle: Copy) -> bool:
        handle.stubborn -= handle.state == "failed"
        if handle.state == "failed" and handle.stubborn >= 0:
            return False
        handle.released = True
        return True

    def notify(self, peer: str, message: bytes) -> None:
        if peer not in self.wire.inboxes or peer not in self.connected:
            raise TransportError(f"{peer} is gone")
        self.notified.add(peer)
        if peer in self.reached:
            self.wire.inboxes[peer].append(message)

    def notifications(self) -> list[bytes]:
        if (inbox := self.wire.inboxes.get(self.name)) is None:
            raise TransportError("the transport is closed")
        self._advance()
        self.wire.calls[self.name] += 1
        return [inbox.popleft() for _ in range(len(inbox))]

    def close(self) -> None:
        self.own.clear()  # the agent's end is the end of its reads
        self.wire.inboxes.pop(self.name, None)


def box(pool: np.ndarray, layer: str = "layers.0") -> Box:
    """What tells peers of a pool of uint8 [block, byte]: one KV head, tokens of 4 bytes."""
    blocks, nbytes = pool.shape
    return Box(
        layer=layer,
        part="kv",
        element="uint8",
        group=0,
        address=pool.ctypes.data,
        num_blocks=blocks,
        block_stride=nbytes,
        pieces=1,
        tokens=nbytes // 4,
        unit=1,
        token_stride=4,
        axes=(Axis("head", 0, 1, 1, nbytes),),
        width=4,
    )


class WorkerEngine:
    """One rank with a pool of uint8 [block, byte], and the side channel of its engine."""

    def __init__(
        self,
        wire: Wire,
        name: str,
        fill: int,
        layer: str = "layers.0",
        trusted: Trust = ANYBODY,
        zeroed: bool = False,
        **options: float | bool,
    ):
        self.pool = np.full((BLOCKS, BYTES), fill, dtype=np.uint8)
        memory = Memory(self.pool.ctypes.data, self.pool.nbytes, zero=self.zero)
        settings = Options(**{"handshake_timeout": PATIENCE_S, **options})
        self.name, self.worker = (
            name,
            Worker(settings, 0, 1, Local(wire, name), (box(self.pool, layer),), [memory], trusted, zeroed),
        )
        self.listener = Listener(Address("127.0.0.1", 0, "p", name), [self.worker.published], trusted)

    def zero(self, start: int, count: int) -> None:
        self.pool.reshape(-1)[start : start + count] = 0

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
            remote_lease_duration=30.0,
            remote_num_tokens=tokens,
            remote_block_ids=[remote],
            remote_first_tokens=[0],
        )
        return Load(handoff, [GroupLoad(local, 0, 0, tokens)])

    def close(self) -> None:
        self.listener.close()
        self.worker.close()


def until_it_reads(d: WorkerEngine, wire: Wire) -> None:
    """Step D until it has met its peer and begun to read from it."""
    deadline = time.monotonic() + 2 * PATIENCE_S
    while not wire.reads:
        assert time.monotonic() < deadline, "D reads nothing"
        d.worker.advance()
