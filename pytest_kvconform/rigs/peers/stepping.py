"""Several engines at once, and scenarios that run on them side by side.

A deadline of the connector costs its time only once.

A scenario is a generator. It yields where it waits, and then every other scenario and every engine goes on.
No call blocks: an engine that stands in a hook for seconds keeps no other engine from stepping. Only a look
at its stack does, for a moment, and only once an engine has hung.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

from pytest_kvconform.rigs.bytes.messages import ByteRequest
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.messages import Output
from pytest_kvconform.rigs.peers.faulty_engine import FaultyEngineHandle
from pytest_kvconform.rigs.processes.cores import Deadline

BLOCK = 16  # tokens
IDLE_S = 0.002  # pause after a round in which no engine computed anything
# Pauses of an engine after empty steps, the first and the longest: a dozen engines share the cores.
EMPTY_STEP_S = (0.01, 0.12)
ROOM_S = 0.1  # for a full engine that has made no room before
Steps = Generator[None, None, Any]


class DeadlinePassed(Exception):
    """What a scenario waits for did not happen by its deadline. The message names it."""


class ScenarioEngineFailed(Exception):
    """An engine that a scenario calls has failed."""

    def __init__(self, engine: SteppedEngine):
        super().__init__(engine.name)
        self.engine = engine


class PeerEngineHandle(FaultyEngineHandle):
    """A handle on `process.PeerEngineProcess`. Its calls are sent and their answers taken without waiting."""

    target = "pytest_kvconform.rigs.peers.process:serve"

    def answered(self) -> bool:
        """Whether an answer, or the end of the process, can be read without waiting."""
        return self.process.connection.poll(0)

    def take_answer(self, name: str) -> Any:
        """The answer to a call, which has arrived. Raises EngineFailed."""
        return self.wait_ready() if name == "start" else self.answer(name)

    def fail_as_hung(self, name: str, deadline: Deadline) -> None:
        """Note that the engine has not answered a call by its deadline. Raises EngineFailed."""
        self._hung(name, deadline)


@dataclass
class Call:
    """One call of an engine, pending or answered."""

    name: str
    arguments: tuple[Any, ...] = ()
    answer: Any = None
    done: bool = False


@dataclass
class SteppedEngine:
    """One engine. It steps whenever no other call is queued, unless it is paused."""

    name: str
    handle: PeerEngineHandle
    # request -> its last output, when it came, and `core_wait` then
    outputs: dict[str, tuple[Output, float, float]] = field(default_factory=dict)
    paused: bool = False
    failed: EngineFailed | None = None
    may_die: bool = False  # its scenario goes on without it
    longest_gap: float = 0.0  # seconds between two steps, since it was last set to 0
    full: bool = False  # other requests have kept its blocks for as long as they may, see `until_computed`

    def __post_init__(self) -> None:
        self.queued: deque[Call] = deque()
        self.pending: Call | None = Call("start")
        self.began = self.stepped_at = time.monotonic()
        self.clock = self.deadline(math.inf)
        self.limit = self._limit("start")
        self.next_step_at = 0.0
        self.pause = EMPTY_STEP_S[0]  # before the next step, if nothing happened; twice as long each time
        self.started = self.stopped = False

    def advance(self) -> bool:
        """Take the answer of the pending call and send the next call. Returns whether a step did work."""
        if self.failed or self.stopped:
            return False
        try:
            return self._advance()
        except EngineFailed as failed:
            self.failed = failed
            return True

    def fails_scenario(self) -> bool:
        """Whether it has failed in a way that ends its scenario."""
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
        return Deadline(seconds, (os.getpid(), self.handle.process.pid))

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
            if output.finish or output.kv_transfer_params:
                self.outputs[output.id] = output, now, self.core_wait()
        busy = bool(call.answer.outputs or call.answer.computed)
        self.next_step_at = now if busy else now + self.pause
        self.pause = EMPTY_STEP_S[0] if busy else min(2 * self.pause, EMPTY_STEP_S[1])
        return busy

    def queue(self, name: str, *arguments: Any) -> Call:
        """Call a method of the engine when it can, and do not wait."""
        self.queued.append(call := Call(name, arguments))
        return call

    def call(self, name: str, *arguments: Any) -> Steps:
        """Call a method of the engine, and wait for its answer."""
        call = self.queue(name, *arguments)
        while not call.done:
            if self.failed:
                raise ScenarioEngineFailed(self)
            yield
        return call.answer

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


def until(test: Callable[[], Any], deadline: Deadline) -> Steps:
    """Wait until a test is true. Returns whether it became true before the deadline."""
    while not test():
        if deadline.over():
            return False
        yield
    return True


def until_computed(engine: SteppedEngine, request: ByteRequest, seconds: float, release_s: float) -> Steps:
    """Wait until an engine has computed the prompt of a request. Returns why it has not, or "".

    `seconds`: at most. `release_s`: at most, while fewer blocks are free than the prompt has, since other
    requests keep them. An engine that has kept them for so long is given ROOM_S the next time.
    """

    def computed() -> bool:
        return request.id in engine.outputs

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


def pause(seconds: float) -> Steps:
    """Let the other scenarios go on for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


def let_run(seconds: float, *engines: SteppedEngine, most: float = math.inf) -> Steps:
    """Let engines, and this process that steps them, run for so many seconds. Time in which they waited for a
    core does not count, so that a busy machine leaves them as much time as an idle one.

    `most`: seconds of the clock after which the wait ends in any case.
    """
    deadline = Deadline(seconds, (os.getpid(), *(engine.handle.process.pid for engine in engines)), look=True)
    end = time.monotonic() + most
    while not deadline.over() and time.monotonic() < end:
        yield


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


@dataclass
class RunningScenario:
    """A scenario that runs: its engines, and its result."""

    steps: Steps
    engines: tuple[SteppedEngine, ...]
    started_first: tuple[SteppedEngine, ...] = ()  # other engines that are up before the scenario starts
    after: RunningScenario | None = None  # a scenario that ends before this one starts
    result: Any = None
    failed_engine: SteppedEngine | None = None
    stuck: str = ""
    started: bool = False
    done: bool = False

    def advance(self) -> None:
        """Take the next step; the first one when the engines are up.

        A failure of one of its engines ends the scenario.
        """
        failed = next((engine for engine in self.engines if engine.fails_scenario()), None)
        if not failed and not self.started:
            up = all(engine.started or engine.failed for engine in (*self.engines, *self.started_first))
            self.started = up and (self.after is None or self.after.done)
        try:
            if failed:
                self.failed_engine, self.done = failed, True
                self.steps.close()
            elif self.started:
                next(self.steps)
        except StopIteration as end:
            self.result, self.done = end.value, True
        except DeadlinePassed as passed:
            self.stuck, self.done = str(passed), True
        except ScenarioEngineFailed as error:  # an engine that the scenario itself has started
            self.failed_engine, self.done = error.engine, True


def run_scenarios(scenarios: list[RunningScenario], all_engines: Callable[[], list[SteppedEngine]]) -> None:
    """Run scenarios to their ends. `all_engines` returns the engines that have been started so far."""
    while any(not scenario.done for scenario in scenarios):
        busy = [engine.advance() for engine in all_engines()]
        for scenario in scenarios:
            if not scenario.done:
                scenario.advance()
        if not any(busy):
            time.sleep(IDLE_S)
