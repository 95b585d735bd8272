"""The engines of a cell's running scenarios, and the parts of a scenario: P computes a prompt, D loads it."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.bytes.faulty.engine import FaultyEngineHandle
from pytest_kvconform.rigs.bytes.faulty.messages import EngineObservation
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec, ByteRequest, Check
from pytest_kvconform.rigs.cluster.byte_bench import call_deadline
from pytest_kvconform.rigs.cluster.engine import Engine, Steps
from pytest_kvconform.rigs.cluster.loop import DeadlinePassed, Script, until
from pytest_kvconform.rigs.cluster.peers.hostile_clients import CuttingProxy, SilentListener
from pytest_kvconform.rigs.context import Deadlines, RunContext, declared_addition
from pytest_kvconform.rigs.engine.handle import EngineFailed, leave_all
from pytest_kvconform.rigs.engine.messages import ON_D, ON_P, Trace, Usage
from pytest_kvconform.rigs.engine.router import decode_params, prefill_params, transfer_id_of
from pytest_kvconform.rigs.history import History
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scenario import Faults, faults_where_p_writes, tokens

if TYPE_CHECKING:
    from pytest_kvconform.rigs.cluster.peers.bench import PeerBench

BLOCK = 16  # tokens
OBSERVED = ("histories", "all_traces", "finished_count")  # calls whose answers are an EngineObservation
ROOM_S = 0.1  # for a full engine that has made no room before
LENGTH = 52  # tokens of a prompt: whole blocks of 16 and a part
AT_ONCE = 12  # requests that an engine holds at once
# The first of the 8 hexadecimal digits that a server adds to the id of a request.
SERVERS = {"p": ON_P[-1], "d": ON_D[-1]}
KEPT = 0.6  # of a lease: for so long at least a heartbeat renews it
HELD = Faults(hold=1 << 30)  # hold transfers until `start_held_transfers`
NO_FAULTS = "needs a connector that moves bytes with NIXL, or that has kvconform_fault (docs/stores.md)"
NO_TRANSFER = "the connector began no transfer that could be held"
KEEPS = "P writes what D loads, and keeps what it is writing from for longer than a lease"
WITHIN_STEP = "D loads within the step that reads the KV, so that no step can run while a load is held"


@dataclass(frozen=True)
class PeerScenario:
    """A scenario and its engines, by name. The first letter of a name is the role."""

    steps: Callable[..., Steps]  # steps(engines, *its engines, *other engines) -> ScenarioObservation
    engines: tuple[str, ...]
    # each computes one prompt at the start; the scenario does not judge them
    other_engines: tuple[str, ...] = ()
    after: str = ""  # a scenario that ends before this one starts
    beside: tuple[str, ...] = ()  # scenarios that this one needs while it runs
    waits_for_lease: bool = False  # whether it waits for a lease to end
    starts_early: bool = False  # while engines of other scenarios are still being started: it waits longest
    over_tcp: bool = False  # NIXL of its engines reads with P's help
    limits_loads: bool = False  # loads of its engines may take so long alone, see PeerBench.spec


def together(every: dict[str, PeerScenario], names: Iterable[str]) -> dict[str, PeerScenario]:
    """Return those of the scenarios that run where these do, by name, in the order of `every`: they
    themselves, those that each comes after, and those beside it. Names that `every` lacks are left out.
    """
    found, todo = set[str](), every.keys() & names
    while todo:
        found |= todo
        needed = {one for name in todo for one in (every[name].after, *every[name].beside) if one}
        todo = needed - found
    return {name: scenario for name, scenario in every.items() if name in found}


class PeerEngineHandle(FaultyEngineHandle):
    """A handle on `process.PeerEngineProcess`."""

    target = "pytest_kvconform.rigs.bytes.faulty.peer:serve"


def prompt_length(context: RunContext) -> int:
    """Tokens of a prompt: more if the connector declares that it loads nothing of so short a prompt."""
    return LENGTH + declared_addition(context.subject, BLOCK)


def loaded_within_step(trace: Trace) -> bool:
    """Whether D loaded KV of a request within the step that read it."""
    return bool(trace.external_tokens) and not trace.asynchronous


@dataclass(frozen=True)
class PrefillResult:
    """One prompt that P has computed."""

    id: str  # of P's request
    number: int  # of the prompt
    params: dict[str, Any] | None  # kv_transfer_params
    trace: Trace
    added: float  # seconds of the monotonic clock


@dataclass(frozen=True)
class DecodeResult:
    """One request of D and its end."""

    id: str
    prefill_added: float  # when P's request was added: its lease is counted from then at the earliest
    added: float  # these three: seconds of the monotonic clock
    ended: float
    finish: str  # vLLM's finish reason; "": the request has not ended
    trace: Trace
    checks: tuple[Check, ...]  # of every rank, before the first forward that read what was loaded
    core_wait: float = 0.0  # seconds of ended - added in which D waited for a core


@dataclass(frozen=True)
class ScenarioObservation:
    """All that one scenario showed. The cases judge it; the rig judges nothing."""

    decodes: dict[str, DecodeResult] = field(default_factory=dict)
    prefills: dict[str, PrefillResult] = field(default_factory=dict)
    audits: tuple[Check, ...] = ()  # the whole pool of every rank of D, after the end
    usage: dict[str, Usage] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    request_ids: dict[str, str] = field(default_factory=dict)  # of requests that are not handed over
    ranks: tuple[History, ...] = ()  # D's, in steps of this scenario, or until transfers were let go
    engines: dict[str, EngineObservation] = field(default_factory=dict)  # of the engines that still answered
    unsupported: str = ""  # what the connector lacks and may lack, so that the scenario could not run
    too_slow: str = ""  # why the machine was too slow to judge
    raised: str = ""  # the exception of a hook that the scenario itself has called: "ValueError: message"
    failed: EngineFailed | None = None
    failed_engine: str = ""  # name of the engine that failed
    started: bool = True  # whether the scenario had started by then
    stuck: str = ""
    log: tuple[str, ...] = ()  # exceptions that its engines wrote to their logs


def until_computed(engine: Engine, request: ByteRequest, seconds: float, release_s: float) -> Steps:
    """Wait until an engine has computed the prompt of a request. Returns why it has not, or "".

    `seconds`: at most. `release_s`: at most, while fewer blocks are free than the prompt has, since other
    requests keep them. An engine that has kept them for so long is given ROOM_S the next time.
    """

    def computed() -> bool:
        return request.id in engine.ends

    deadline = engine.deadline(seconds)
    room_s = ROOM_S if engine.full else min(seconds, release_s)
    if (yield from until(computed, engine.deadline(room_s))):
        engine.full = False
        return ""
    length, usage = len(request.tokens), (yield from engine.call("usage"))
    waits = not any(request.id in group for group in usage.group_requests)
    if waits and usage.free_blocks * BLOCK < length:
        engine.full = True
        return (
            f"{engine.name[0]} had no room for a prompt of {length} tokens within {room_s:.3g} s: "
            f"{usage.free_blocks} of {usage.total_blocks} blocks are free, and it has {len(usage.requests)} "
            f"requests: {', '.join(usage.requests[:4])}"
        )
    if (yield from until(computed, deadline)):
        return ""
    return f"{engine.name[0]} did not compute a prompt of {length} tokens within {seconds:.0f} s"


class ScenarioEngines:
    """The engines of one cell while its scenarios run."""

    def __init__(self, bench: PeerBench, cell: Cell, limits: Deadlines, lease_s: float):
        self.bench, self.cell, self.limits, self.lease_s = bench, cell, limits, lease_s
        self.by_name: dict[str, Engine] = {}
        self.running: dict[str, Script] = {}
        self.silent_listeners: list[SilentListener] = []
        self.proxies: list[CuttingProxy] = []
        self.of_p: set[str] = set()  # requests of D with held transfers that P began
        self.prefills_elsewhere = 0  # times that a scenario has let another one's engine compute a prompt
        self._router = bench.context.next_name()
        self._specs: dict[str, ByteEngineSpec] = {}
        self._numbers = itertools.count()
        self._deadlines: dict[str, Deadline] = {}  # request of D -> when it must have ended
        self._core_waits: dict[str, float] = {}  # request of D -> `core_wait` of D when it was added
        self._suffixes = itertools.count()  # what a server adds to the router's id of a request
        self._added: dict[int, float] = {}  # number of a prompt -> when P's request was added

    def start(self, name: str, after: str = "") -> Engine:
        """Start an engine. `after`: an engine that has ended, whose ports the new one gets."""
        context = self.bench.context
        spec = self._specs[name] = self._specs[after] if after else self.bench.spec(name, self.cell)
        full, waits = f"{self.cell}-{name}-{context.next_name()}", (call_deadline(context), self.limits.start)
        handle = PeerEngineHandle(context.address, full, spec, *waits, context.hung_in)
        engine = self.by_name[name] = Engine(name, handle)
        return engine

    def all(self) -> list[Engine]:
        """Every engine that was started so far. Listeners and proxies read what they have received."""
        for one in self._doors():
            one.receive()
        return list(self.by_name.values())

    def observations(self) -> dict[str, EngineObservation]:
        """What every engine did that can still answer."""
        found = {}
        for name, engine in self.by_name.items():
            if engine.handle.dead or engine.stopped:
                continue
            with contextlib.suppress(EngineFailed):
                if engine.pending is not None:
                    engine.handle.take_answer(engine.pending.name)
                (scheduler, *ranks), traces, count = map(engine.handle.call, OBSERVED)
                found[name] = EngineObservation(tuple(ranks), traces, scheduler, count)
        return found

    def close(self) -> None:
        """Let the engines shut down, and end those that are stopped or ended; end listeners and proxies."""
        for engine in self.by_name.values():
            if engine.stopped:
                engine.handle.end()
        leave_all([engine.handle for engine in self.by_name.values()])
        for one in self._doors():
            one.close()

    def _doors(self) -> list[SilentListener | CuttingProxy]:
        return [*self.silent_listeners, *self.proxies]

    # ---- requests ------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of a prompt."""
        return prompt_length(self.bench.context)

    def new_prompt(self) -> int:
        """The number of a prompt that no engine has computed."""
        return next(self._numbers)

    def make_request(
        self, number: int, side: str, params: dict[str, Any] | None, length: int = 0, chosen: str = ""
    ) -> ByteRequest:
        """A request with the prompt of this number, of `length` tokens if that is given. `side`: "p" or "d".

        Its id is as in vLLM's servers, see ON_P: the router's, which P and D share and whose end may be
        `chosen` by a client, and that of the server.
        """
        return ByteRequest(
            id=f"{self._router}-{number}{chosen}-{SERVERS[side]}{next(self._suffixes):07x}",
            tokens=tokens(length or self.length, seed=number),
            max_tokens=1,
            kv_transfer_params=params,
            salt=f"prompt {number}",
            watch=side == "d",
            owners=np.full(length or self.length, number),
            number=number,
        )

    def prefill_params(self) -> dict[str, Any] | None:
        """The kv_transfer_params of a new request of P. Which engine decodes it is not decided yet."""
        decoder = next(spec for name, spec in self._specs.items() if name.startswith("D"))
        context = self.bench.context
        return prefill_params(decoder.handover, context.next_name(), decoder, context.address)

    def prefill(self, p: Engine, length: int = 0, chosen: str = "") -> Steps:
        """Let P compute a new prompt to hand over, see `make_request`. Returns PrefillResult."""
        request = self.make_request(self.new_prompt(), "p", self.prefill_params(), length, chosen)
        added = self._added[request.number] = time.monotonic()
        yield from p.call("add", request)
        release_s = self.lease_s + self.limits.release
        if why := (yield from until_computed(p, request, self.limits.request, release_s)):
            raise DeadlinePassed(why)
        trace = yield from p.call("trace", request.id)
        spec, returned = p.spec, p.ends[request.id].output.kv_transfer_params
        transfer_id, zygote = transfer_id_of(request.kv_transfer_params), self.bench.context.address
        params = decode_params(spec.handover, transfer_id, spec, returned, zygote)
        return PrefillResult(request.id, request.number, params, trace, added)

    def add_decode(
        self, d: Engine, prefill: PrefillResult | None, params: dict[str, Any] | None = None
    ) -> Steps:
        """Add D's request for a prompt that P has computed, or for a new prompt. Returns ByteRequest."""
        number = prefill.number if prefill else self.new_prompt()
        request = self.make_request(number, "d", params or (prefill.params if prefill else None))
        self._deadlines[request.id] = d.deadline(self.limits.request)
        self._core_waits[request.id] = d.core_wait()
        yield from d.call("add", request)
        return request

    def finish_decode(self, d: Engine, request: ByteRequest, added: float) -> Steps:
        """Wait for the end of a request of D. Returns DecodeResult."""
        deadline = self._deadlines.get(request.id) or d.deadline(self.limits.request)
        yield from until(lambda: request.id in d.ends, deadline)
        output, ended, waited = d.ends.get(request.id, (None, time.monotonic(), d.core_wait()))
        waited -= self._core_waits.get(request.id, waited)
        trace = yield from d.call("trace", request.id)
        checks = yield from d.call("pop_checks", request.id)
        prefill_added = self._added.get(request.number, added)
        finish = (output.finish or "") if output else ""
        return DecodeResult(request.id, prefill_added, added, ended, finish, trace, checks, waited)

    def decode(self, d: Engine, prefill: PrefillResult | None, params: dict[str, Any] | None = None) -> Steps:
        """Add D's request for a prompt and wait for its end. Returns DecodeResult."""
        added = time.monotonic()
        request = yield from self.add_decode(d, prefill, params)
        return (yield from self.finish_decode(d, request, added))

    def decode_all(
        self, d: Engine, wanted: dict[str, tuple[PrefillResult | None, dict[str, Any] | None]]
    ) -> Steps:
        """`decode` of several requests, added one right after the other. Returns name -> DecodeResult."""
        added, requests = time.monotonic(), {}
        for name, (prefill, params) in wanted.items():
            requests[name] = yield from self.add_decode(d, prefill, params)
        decodes = {}
        for name, request in requests.items():
            decodes[name] = yield from self.finish_decode(d, request, added)
        return decodes

    # ---- transfers that are held ---------------------------------------------------------------------------

    def add_decode_with_faults(
        self,
        p: Engine,
        d: Engine,
        prefill: PrefillResult,
        faults: Faults,
        at_once: bool = False,
    ) -> Steps:
        """Add a request of D whose load these faults change: transfers that D begins, or P if P writes.

        `at_once`: those, too, that D begins before the request has blocks. Returns (request, when it was
        added), or why no transfer was changed.
        """
        means = (yield from d.call("fault_reports")) + (yield from p.call("fault_reports"))
        if not sum(report.agents + report.hooks for report in means):
            return NO_FAULTS
        if faults.hold and any(map(loaded_within_step, (yield from d.call("all_traces")).values())):
            return WITHIN_STEP
        yield from d.call("set_faults" if at_once else "set_faults_of_next_load", (faults,))
        yield from p.call("set_faults", faults_where_p_writes((faults,), p.ranks, d.ranks))
        added = time.monotonic()
        request = yield from self.add_decode(d, prefill)
        ranks, begun, deadline = faults.ranks or range(d.ranks), False, d.deadline(self.limits.release)
        within = over = False  # a connector may load some requests within a step, and others between steps
        while not (begun or within or over):
            over = deadline.over() or request.id in d.ends
            reports = yield from d.call("fault_reports")
            if any(report.changed for report in (yield from p.call("fault_reports"))):
                self.of_p.add(request.id)
            begun = request.id in self.of_p or all(reports[rank].changed for rank in ranks)
            within = bool(faults.hold) and loaded_within_step((yield from d.call("trace", request.id)))
        for engine in (p, d):
            yield from engine.call("set_faults", ())  # what is held stays held
        if within:
            yield from self.start_held_transfers(p, d, request)
            yield from self.finish_decode(d, request, added)
        return WITHIN_STEP if within else (request, added) if begun else NO_TRANSFER

    def start_held_transfers(self, p: Engine, d: Engine, request: ByteRequest) -> Steps:
        """Begin what is held on P and on D. The deadline of D's request begins now: it was held before."""
        for engine in (p, d):
            yield from engine.call("start_held_transfers")
        self._deadlines[request.id] = d.deadline(self.limits.request)

    def wait_until_empty(self, engine: Engine) -> Steps:
        """Wait until an engine is empty, or until its deadline to free blocks. Returns Usage."""
        deadline = engine.deadline(self.limits.release)
        while True:
            usage: Usage = yield from engine.call("usage")
            empty = usage.free_blocks == usage.total_blocks and not usage.requests
            if empty or deadline.over():
                return usage
            yield

    def wait_until_gone(self, engine: Engine, request_id: str, seconds: float) -> Steps:
        """Wait until an engine holds nothing of a request. Returns when; 0.0: not within `seconds`."""
        deadline = engine.deadline(seconds)
        while (yield from engine.call("holds", request_id)):
            if deadline.over():
                return 0.0
            yield
        return time.monotonic()

    def wait_until_freed(self, p: Engine, prefill: PrefillResult, seconds: float) -> Steps:
        """Wait until P no longer holds a request, and another one has overwritten its blocks.

        Returns when P no longer held it; 0.0: not within `seconds`.
        """
        if not (freed := (yield from self.wait_until_gone(p, prefill.id, seconds))):
            return 0.0
        deadline = p.deadline(self.limits.release)
        while not (yield from p.call("overwritten")) and not deadline.over():
            yield
        return freed

    def too_slow(self, p: Engine, d: Engine, waited: float = math.inf) -> str:
        """Return why a lease cannot be tested, or "".

        Engines took no step for a good part of the lease, so that no heartbeat was sent or read. `waited`:
        seconds for which D waited for a core while it loaded. Without them the connector held up D's step.
        """
        longest = sum(max(engine.longest_gap, time.monotonic() - engine.stepped_at) for engine in (p, d))
        if longest < self.lease_s * KEPT or waited < self.lease_s * KEPT / 2:
            return ""
        return (
            f"engines were not stepped for {longest:.1f} s, and the lease is {self.lease_s:.0f} s: "
            "--kv-timeout-scale makes it longer"
        )
