"""Several engines at once, and stories told on them side by side: what waits for a deadline of the connector's costs its time only once.

A story is a generator. It yields where it waits, and then every other story and every engine goes on. No call blocks: an engine that
stands in a hook for seconds keeps nobody else from stepping.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.messages import Output
from pytest_kvconform.rigs.peers.faulty_engine import FaultyEngineHandle

IDLE_S = 0.002  # pause after a round in which no engine computed anything
EMPTY_S = (
    0.01,
    0.12,
)  # pauses of an engine after steps in which nothing happened, the first and the longest: a dozen share the cores
Steps = Generator[None, None, Any]


class Stuck(Exception):
    """What a story waits for did not come by its deadline. The message says what."""


class Broken(Exception):
    """An engine that a story asks something has failed."""

    def __init__(self, actor: Actor):
        super().__init__(actor.name)
        self.actor = actor


@dataclass
class Call:
    """One call of an engine, on its way or answered."""

    name: str
    arguments: tuple[Any, ...] = ()
    answer: Any = None
    done: bool = False


class Handle(FaultyEngineHandle):
    """A handle on `peer_engine.PeerEngine`."""

    target = "pytest_kvconform.rigs.peers.process:serve"

    def answered(self) -> bool:
        """Whether an answer, or the end of the process, can be read without waiting."""
        return self.process.connection.poll(0)

    def take(self, name: str) -> Any:
        """The answer that is there. Raises EngineFailed."""
        return self.wait_ready() if name == "start" else self.answer(name)

    def hung(self, name: str, seconds: float) -> None:
        """Note that a call has not been answered for so long. Raises EngineFailed."""
        self._hung(name, seconds)


@dataclass
class Actor:
    """One engine. It steps by itself whenever it is asked for nothing else, unless it is paused."""

    name: str
    handle: Handle
    ends: dict[str, tuple[Output, float]] = field(
        default_factory=dict
    )  # request -> its last output, and when it came
    paused: bool = False
    failed: EngineFailed | None = None
    longest_gap: float = 0.0  # seconds between two steps, since it was last set to 0

    def __post_init__(self) -> None:
        self.todo: deque[Call] = deque()
        self.call: Call | None = Call("start")
        self.since = self.stepped = time.monotonic()
        self.next = 0.0  # when it takes the next step
        self.pause = EMPTY_S[0]  # before it, if nothing happened; twice as long each time
        self.up = self.stopped = False

    def turn(self) -> bool:
        """Take what the engine says and ask it for the next thing. Returns whether it said anything."""
        if self.failed or self.stopped:
            return False
        try:
            return self._turn()
        except EngineFailed as failed:
            self.failed = failed
            return True

    def _turn(self) -> bool:
        said = False
        if self.call is not None:
            if not self.handle.answered():
                limit = self.handle.start_s if self.call.name == "start" else self.handle.deadline_s
                if time.monotonic() - self.since > limit:
                    self.handle.hung(self.call.name, limit)
                return False
            call, self.call = self.call, None
            call.answer = self.handle.take(call.name)
            said, call.done = self._note(call), True
        if self.todo:
            self.call = self.todo.popleft()
        elif not self.paused and time.monotonic() >= self.next:
            self.call = Call("step", (0.0,))
        if self.call:
            self.since = time.monotonic()
            self.handle.send(self.call.name, *self.call.arguments)
        return said

    def _note(self, call: Call) -> bool:
        """Note what a step said. Returns whether it was anything but an empty one."""
        self.up = True
        if call.name != "step":
            self.next, self.pause = 0.0, EMPTY_S[0]
            return False
        now = time.monotonic()
        self.longest_gap, self.stepped = max(self.longest_gap, now - self.stepped), now
        for output in call.answer.outputs:
            if output.finish or output.kv_transfer_params:
                self.ends[output.id] = output, now
        busy = bool(call.answer.outputs or call.answer.computed)
        self.next = now if busy else now + self.pause
        self.pause = EMPTY_S[0] if busy else min(2 * self.pause, EMPTY_S[1])
        return busy

    def ask(self, name: str, *arguments: Any) -> Steps:
        """Call a method of the engine, and wait for its answer."""
        self.todo.append(call := Call(name, arguments))
        while not call.done:
            if self.failed:
                raise Broken(self)
            yield
        return call.answer

    def rest(self) -> Steps:
        """Let it step no more, and wait until it stands still."""
        self.paused = True
        while self.call or self.todo:
            yield

    def stop(self) -> Steps:
        """Stop its process and all its threads, as a machine that hangs does."""
        yield from self.rest()
        self.stopped = True
        os.kill(self.handle.process.pid, signal.SIGSTOP)

    def end(self) -> None:
        """End it, as a person or a crash does."""
        self.handle.end()
        self.stopped = True

    def resume(self) -> None:
        """Let it go on, after `rest` or `stop`."""
        if self.stopped:
            os.kill(self.handle.process.pid, signal.SIGCONT)
        self.paused = self.stopped = False
        self.stepped = time.monotonic()


def until(test: Callable[[], Any], seconds: float) -> Steps:
    """Wait until a test is true. Returns whether it was by then."""
    deadline = time.monotonic() + seconds
    while not test():
        if time.monotonic() > deadline:
            return False
        yield
    return True


def pause(seconds: float) -> Steps:
    """Let the others go on for so long."""
    yield from until(lambda: False, seconds)


@dataclass
class Telling:
    """A story on its way: the engines it stands on, and what became of it."""

    steps: Steps
    actors: tuple[Actor, ...]
    first: tuple[Actor, ...] = ()  # other engines that are up before it begins
    after: Telling | None = None  # a story that ends before it begins
    result: Any = None
    broken: Actor | None = None  # the engine that failed
    stuck: str = ""
    begun: bool = False
    done: bool = False

    def go_on(self) -> None:
        """Take the next step; the first one when the engines are up. An engine of its own that fails ends the story."""
        failed = next((actor for actor in self.actors if actor.failed), None)
        if not failed and not self.begun:
            self.begun = all(a.up or a.failed for a in (*self.actors, *self.first)) and (
                self.after is None or self.after.done
            )
        try:
            if failed:
                self.broken, self.done = failed, True
                self.steps.close()
            elif self.begun:
                next(self.steps)
        except StopIteration as end:
            self.result, self.done = end.value, True
        except Stuck as stuck:
            self.stuck, self.done = str(stuck), True
        except Broken as broken:  # one that the story itself has started
            self.broken, self.done = broken.actor, True


def tell(tellings: list[Telling], everybody: Callable[[], list[Actor]]) -> None:
    """Run stories to their ends. `everybody`: the engines there are by now."""
    while any(not telling.done for telling in tellings):
        said = [actor.turn() for actor in everybody()]
        for telling in tellings:
            if not telling.done:
                telling.go_on()
        if not any(said):
            time.sleep(IDLE_S)
