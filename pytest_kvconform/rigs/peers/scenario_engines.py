"""The engines of one cell while stories are told on them, and what stories are made of: prompts that P computes and requests of D."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.bytes.bench import call_deadline
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec, ByteRequest, Check
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.handover import PREFILL
from pytest_kvconform.rigs.engine.messages import Trace, Usage
from pytest_kvconform.rigs.peers.hostile_clients import Deaf
from pytest_kvconform.rigs.peers.messages import Watched
from pytest_kvconform.rigs.peers.stepping import Actor, Handle, Steps, Stuck, Telling, until
from pytest_kvconform.rigs.scenario import Faults, tokens

if TYPE_CHECKING:
    from pytest_kvconform.rigs.peers.bench import PeerBench

LENGTH = 36  # tokens of a prompt: two whole blocks of 16 and a part
LONGEST = 12 * LENGTH  # tokens: of all requests that an engine holds at once
KEPT = 0.6  # of a lease: for so long at least a heartbeat keeps it alive
HELD = Faults(hold=1 << 30)  # until it is let go
NO_AGENT = "needs a connector that moves bytes with NIXL: no agent was made"
NO_TRANSFER = "the connector began no transfer that could be held"


@dataclass(frozen=True)
class Handed:
    """One prompt that P has computed."""

    id: str  # of P's request
    number: int  # of the prompt
    params: dict[str, Any] | None  # kv_transfer_params
    trace: Trace
    added: float  # seconds of the monotonic clock


@dataclass(frozen=True)
class Ended:
    """One request of D and its end."""

    id: str
    handed: float  # seconds of the monotonic clock: when P's request was added, from when its lease is counted at the earliest
    added: float
    ended: float
    finish: str  # vLLM's finish reason; "": it has not ended
    trace: Trace
    checks: tuple[Check, ...]  # of every rank, before the first forward that read what was loaded


@dataclass(frozen=True)
class EngineSeen:
    """What an engine did in all its stories together."""

    watched: tuple[Watched, ...]  # one record a rank
    traces: dict[str, Trace]  # request -> what was done with it


@dataclass(frozen=True)
class StorySeen:
    """All that one story showed. Cases judge it; nothing is judged here."""

    requests: dict[str, Ended] = field(default_factory=dict)
    handed: dict[str, Handed] = field(default_factory=dict)
    audits: tuple[Check, ...] = ()  # the whole pool of every rank of D, after the end
    usage: dict[str, Usage] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)  # of requests that are not handed over
    early: tuple[Watched, ...] = ()  # D's ranks while transfers were held
    engines: dict[str, EngineSeen] = field(
        default_factory=dict
    )  # name -> all that it did; those that are gone are not among them
    missing: str = ""  # what the connector has not and need not have, so that there was nothing to see
    slow: str = ""  # the machine did not keep up, so that nothing can be said
    failed: EngineFailed | None = None
    broken: str = ""  # name of the engine that failed
    begun: bool = True  # whether it had begun by then
    stuck: str = ""
    logged: tuple[str, ...] = ()  # exceptions that its engines wrote to their logs


class Desk:
    """The engines of one cell while its stories are told."""

    def __init__(self, bench: PeerBench, cell: Cell, limits: Deadlines, lease_s: float):
        self.bench, self.cell, self.limits, self.lease_s = bench, cell, limits, lease_s
        self.actors: dict[str, Actor] = {}
        self.tellings: dict[str, Telling] = {}
        self.deaf: list[Deaf] = []
        self.borrowed = 0  # times that a story has let an engine of another one compute something
        self._specs: dict[str, ByteEngineSpec] = {}
        self._numbers = itertools.count()
        self._handed: dict[int, float] = {}  # number of a prompt -> when P's request was added

    def open(self, name: str, after: str = "") -> Actor:
        """Start an engine; `after`: one that has ended, on its ports."""
        context = self.bench.context
        spec = self._specs[name] = self._specs[after] if after else self.bench.spec(name[0], self.cell)
        handle = Handle(
            context.address,
            f"{self.cell}-{name}-{context.next_name()}",
            spec,
            call_deadline(context),
            self.limits.start,
        )
        actor = self.actors[name] = Actor(name, handle)
        return actor

    def everybody(self) -> list[Actor]:
        """Every engine there is by now; listeners note what they are told."""
        for deaf in self.deaf:
            deaf.listen()
        return list(self.actors.values())

    def seen(self) -> dict[str, EngineSeen]:
        """What every engine did that can still answer."""
        found = {}
        for name, actor in self.actors.items():
            if actor.handle.dead or actor.stopped:
                continue
            with contextlib.suppress(EngineFailed):
                if actor.call is not None:
                    actor.handle.take(actor.call.name)
                found[name] = EngineSeen(actor.handle.call("reports"), actor.handle.call("all_traces"))
        return found

    def close(self) -> None:
        """End engines and listeners."""
        for actor in self.actors.values():
            actor.handle.end()
        for deaf in self.deaf:
            deaf.close()

    # ---- requests -------------------------------------------------------------------------------------------------------------

    def next(self) -> int:
        """The number of a prompt that nobody has computed."""
        return next(self._numbers)

    def request(self, number: int, side: str, params: dict[str, Any] | None) -> ByteRequest:
        """A request with the prompt of this number."""
        return ByteRequest(
            id=f"{self.bench.context.next_name()}-{side}",
            tokens=tokens(LENGTH, seed=number),
            max_tokens=1,
            kv_transfer_params=params,
            salt=f"prompt {number}",
            watch=side == "d",
            owners=np.full(LENGTH, number),
            number=number,
        )

    def compute(self, p: Actor) -> Steps:
        """Let P compute a new prompt for somebody. Returns Handed."""
        request = self.request(self.next(), "p", PREFILL)
        added = self._handed[request.number] = time.monotonic()
        yield from p.ask("add", request)
        if not (yield from until(lambda: request.id in p.ends, self.limits.request)):
            raise Stuck(f"P did not compute a prompt of {LENGTH} tokens within {self.limits.request:.0f} s")
        trace = yield from p.ask("trace", request.id)
        return Handed(request.id, request.number, p.ends[request.id][0].kv_transfer_params, trace, added)

    def begin(self, d: Actor, handed: Handed | None, params: dict[str, Any] | None = None) -> Steps:
        """Add D's request for what P has handed over, or for a new prompt that nobody has. Returns it."""
        number = handed.number if handed else self.next()
        request = self.request(number, "d", params or (handed.params if handed else None))
        yield from d.ask("add", request)
        return request

    def end(self, d: Actor, request: ByteRequest, added: float) -> Steps:
        """Wait for the end of a request of D. Returns Ended."""
        yield from until(lambda: request.id in d.ends, self.limits.request - (time.monotonic() - added))
        output, ended = d.ends.get(request.id, (None, time.monotonic()))
        trace = yield from d.ask("trace", request.id)
        checks = yield from d.ask("taken", request.id)
        handed = self._handed.get(request.number, added)
        return Ended(request.id, handed, added, ended, (output.finish or "") if output else "", trace, checks)

    def receive(self, d: Actor, handed: Handed | None, params: dict[str, Any] | None = None) -> Steps:
        """Let D get what P has handed over, to the end. Returns Ended."""
        added = time.monotonic()
        request = yield from self.begin(d, handed, params)
        return (yield from self.end(d, request, added))

    def receive_all(self, d: Actor, wanted: dict[str, tuple[Handed | None, dict[str, Any] | None]]) -> Steps:
        """The same for several requests that are added one right after the other. Returns name -> Ended."""
        added, requests = time.monotonic(), {}
        for name, (handed, params) in wanted.items():
            requests[name] = yield from self.begin(d, handed, params)
        ends = {}
        for name, request in requests.items():
            ends[name] = yield from self.end(d, request, added)
        return ends

    # ---- transfers that are held ----------------------------------------------------------------------------------------------

    def hold(self, d: Actor, handed: Handed, faults: Faults) -> Steps:
        """Begin a request of D whose transfers the faults are for. Returns (request, when it was added), or why there was nothing."""
        if not sum(struck.agents for struck in (yield from d.ask("fault_reports"))):
            return NO_AGENT
        yield from d.ask("set_faults", (faults,))
        added = time.monotonic()
        request = yield from self.begin(d, handed)
        ranks, deadline, begun = faults.ranks or range(d.handle.ranks), added + self.limits.release, False
        while not begun and time.monotonic() < deadline:
            struck = yield from d.ask("fault_reports")
            begun = all(struck[rank].changed for rank in ranks)
        yield from d.ask("set_faults", ())  # what is held stays held
        return (request, added) if begun else NO_TRANSFER

    def free(self, engine: Actor) -> Steps:
        """Wait until an engine holds nothing. Returns Usage, at the latest when blocks have to be back."""
        deadline = time.monotonic() + self.limits.release
        while True:
            usage: Usage = yield from engine.ask("usage")
            if (
                usage.free_blocks == usage.total_blocks and not usage.requests
            ) or time.monotonic() > deadline:
                return usage
            yield

    def freed(self, p: Actor, handed: Handed, seconds: float) -> Steps:
        """Wait until P does not have a request any more. Returns when that was seen, 0.0: not by then."""
        deadline = time.monotonic() + seconds
        while handed.id in (yield from p.ask("usage")).requests:
            if time.monotonic() > deadline:
                return 0.0
            yield
        return time.monotonic()

    def too_slow(self, p: Actor, d: Actor) -> str:
        """Why nothing can be said about a lease, if engines stood still for a good part of it: heartbeats were not sent, or not heard."""
        longest = sum(max(engine.longest_gap, time.monotonic() - engine.stepped) for engine in (p, d))
        if longest < self.lease_s * KEPT:
            return ""
        return f"engines were not stepped for {longest:.1f} s, and the lease is {self.lease_s:.0f} s: --kv-timeout-scale makes it longer"
