"""One engine process as a script sees it: its calls are sent and their answers taken without waiting."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pytest_kvconform.rigs.engine.handle import EngineFailed, EngineHandle
from pytest_kvconform.rigs.engine.messages import EngineFacts, Output, Step
from pytest_kvconform.rigs.processes.cores import Deadline

# Pauses of an engine after empty steps, the first and the longest: a dozen engines share the cores.
EMPTY_STEP_S = (0.01, 0.12)
# `step_beside`: how long a step lasts before the peer steps, too; the pause after the peer's first step,
# which doubles with each step; the longest pause
ALONE_S, BESIDE_S, SELDOM_S = 0.02, 0.005, 0.05
Steps = Generator[None, None, Any]


@dataclass
class Call:
    """One call of an engine, pending or answered."""

    name: str
    arguments: tuple[Any, ...] = ()
    answer: Any = None
    done: bool = False


class End(NamedTuple):
    """The end of a request: its last output, when it came, and `Engine.core_wait` then."""

    output: Output
    at: float
    core_wait: float


@dataclass(eq=False)
class Engine:
    """One engine. It steps whenever no other call is queued, unless it is paused."""

    name: str
    handle: EngineHandle
    started: bool = False  # whether it has answered its start
    paused: bool = False
    outputs: dict[str, list[Output]] = field(default_factory=dict)  # request -> all of them
    ends: dict[str, End] = field(default_factory=dict)  # requests that have ended
    failed: EngineFailed | None = None
    may_die: bool = False  # its script goes on without it
    longest_gap: float = 0.0  # seconds between two steps, since it was last set to 0
    full: bool = False  # other requests have kept its blocks for as long as they may, see `turns`

    def __post_init__(self) -> None:
        self.queued: deque[Call] = deque()
        self.pending = None if self.started else Call("start")
        self.began = self.stepped_at = time.monotonic()
        self.clock = self.deadline(math.inf)
        self.limit = self._limit("start")
        self.next_step_at = 0.0
        self.pause = EMPTY_STEP_S[0]  # before the next step, if nothing happened; twice as long each time
        self.stopped = False

    @property
    def spec(self) -> Any:
        """The specification that the engine was started with."""
        return self.handle.spec

    @property
    def role(self) -> str:
        """What it does: "P" prefills, "D" decodes."""
        return self.handle.role

    @property
    def facts(self) -> EngineFacts:
        """What vLLM made of it."""
        return self.handle.facts

    @property
    def ranks(self) -> int:
        """How many ranks it has."""
        ranks: int = self.spec.tensor_parallel
        return ranks

    # ---- what the loop does --------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Take the answer of the pending call and send the next call. Returns whether a step did work."""
        if self.failed or self.stopped:
            return False
        try:
            return self._advance()
        except EngineFailed as failed:
            failed.engine, self.failed = self.name, failed
            return True

    def fails_script(self) -> bool:
        """Whether it has failed in a way that ends its script."""
        return self.failed is not None and not (self.may_die and self.failed.how == "died")

    def _advance(self) -> bool:
        busy = False
        if self.pending is not None:
            if not self.handle.answered():
                if self.limit.over():
                    self.handle.fail_as_hung(self.pending.name, self.limit)
                return False
            call, self.pending = self.pending, None
            call.answer = self.handle.take_answer(call.name)
            busy, call.done = self._record(call), True
        if self.queued:
            self.pending = self.queued.popleft()
        elif not self.paused and time.monotonic() >= self.next_step_at:
            self.pending = Call("step", (0.0,))
        if self.pending:
            self.limit = self._limit(self.pending.name)
            self.handle.send(self.pending.name, *self.pending.arguments)
        return busy

    def deadline(self, seconds: float) -> Deadline:
        """A deadline in seconds in which this engine, and this process that steps it, did not wait for a
        core.
        """
        return Deadline(seconds, (os.getpid(), self.handle.process.watched))

    def core_wait(self) -> float:
        """Seconds so far in which this engine, or this process that steps it, waited for a core."""
        return time.monotonic() - self.began - self.clock.passed()

    def _limit(self, call: str) -> Deadline:
        seconds = self.handle.start_s if call == "start" else self.handle.deadline_s
        return self.handle.call_deadline(seconds, (os.getpid(),))

    def _record(self, call: Call) -> bool:
        """Keep the outputs of a step. Returns whether the step was anything but an empty one."""
        self.started = True
        if call.name != "step":
            self.next_step_at, self.pause = 0.0, EMPTY_STEP_S[0]
            return False
        now = time.monotonic()
        self.longest_gap, self.stepped_at = max(self.longest_gap, now - self.stepped_at), now
        for output in call.answer.outputs:
            self.outputs.setdefault(output.id, []).append(output)
            if output.finish or output.kv_transfer_params:
                self.ends[output.id] = End(output, now, self.core_wait())
        busy = bool(call.answer.outputs or call.answer.computed)
        self.next_step_at = now if busy else now + self.pause
        self.pause = EMPTY_STEP_S[0] if busy else min(2 * self.pause, EMPTY_STEP_S[1])
        return busy

    # ---- what a script does --------------------------------------------------------------------------------

    def queue(self, name: str, *arguments: Any) -> Call:
        """Call a method of the engine when it can, and do not wait."""
        self.queued.append(call := Call(name, arguments))
        return call

    def answer(self, call: Call, seconds: float = math.inf) -> Steps:
        """Wait for the answer to a queued call, for `seconds` of the clock at most. Returns whether it came.

        Raises EngineFailed.
        """
        end = time.monotonic() + seconds
        while not call.done:
            if self.failed:
                raise self.failed
            if time.monotonic() >= end:
                return False
            yield
        return True

    def call(self, name: str, *arguments: Any) -> Steps:
        """Call a method of the engine, and wait for its answer. Raises EngineFailed."""
        call = self.queue(name, *arguments)
        yield from self.answer(call)
        return call.answer

    def add(self, request: Any) -> Steps:
        """Hand a request to the engine. What keeps it from reaching a peer is noted, see `EngineHandle`."""
        self.handle.note_unreachable(request)
        yield from self.call("add", request)

    def step_beside(self, *peers: Engine, seconds: float = 0.0, alone_s: float = ALONE_S) -> Steps:
        """Take a step, during which the peers take steps of their own if it lasts for longer than `alone_s`:
        a connector may load within the step, and need its peer for that. An engine may be its own peer.
        `seconds`: for which it steps until a step does something. Returns the last Step.
        """
        others = [peer for peer in peers if peer is not self]
        call, wait, pause = self.queue("step", seconds), alone_s if others else math.inf, BESIDE_S
        while not (yield from self.answer(call, wait)):
            calls = [(peer, peer.queue("step", 0.0)) for peer in others]
            for peer, stepping in calls:
                yield from peer.answer(stepping)
            wait, pause = pause, min(2 * pause, SELDOM_S)
        step: Step = call.answer
        return step

    def pause_stepping(self) -> Steps:
        """Let the engine take no further step, and wait until no call is pending."""
        self.paused = True
        while self.pending or self.queued:
            yield

    def stop_process(self) -> Steps:
        """Stop the engine's process and all its threads, as a machine that hangs does."""
        yield from self.pause_stepping()
        self.stopped = True
        os.kill(self.handle.process.pid, signal.SIGSTOP)

    def end(self) -> None:
        """End the engine, as an operator or a crash does."""
        self.handle.end()
        self.stopped = True

    def resume(self) -> None:
        """Let the engine go on, after `pause_stepping` or `stop_process`."""
        if self.stopped:
            os.kill(self.handle.process.pid, signal.SIGCONT)
        self.paused = self.stopped = False
        self.stepped_at = time.monotonic()
