"""The loop that advances engines and scripts side by side, and what a script waits with.

No call blocks: an engine that stands in a hook for seconds keeps no other engine from stepping. Only a look
at its stack does, for a moment, and only once an engine has hung. A deadline of the connector costs its time
only once.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from pytest_kvconform.rigs.cluster.engine import Engine, Steps
from pytest_kvconform.rigs.engine.handle import EngineFailed, EngineHandle
from pytest_kvconform.rigs.processes.cores import Deadline

IDLE_S = 0.002  # pause after a round in which no engine computed anything


class DeadlinePassed(Exception):
    """What a script waits for did not happen by its deadline. The message names it."""


@dataclass
class Script:
    """A script that runs: its engines, and its result."""

    steps: Steps
    engines: tuple[Engine, ...]
    started_first: tuple[Engine, ...] = ()  # other engines that are up before the script starts
    after: Script | None = None  # a script that ends before this one starts
    result: Any = None
    failed: EngineFailed | None = None  # how one of its engines failed
    stuck: str = ""
    started: bool = False
    done: bool = False

    def advance(self) -> None:
        """Take the next step; the first one when the engines are up.

        A failure of one of its engines ends the script.
        """
        failed = next((engine.failed for engine in self.engines if engine.fails_script()), None)
        if not failed and not self.started:
            up = all(engine.started or engine.failed for engine in (*self.engines, *self.started_first))
            self.started = up and (self.after is None or self.after.done)
        try:
            if failed:
                self.steps.close()
                raise failed
            if self.started:
                next(self.steps)
        except StopIteration as end:
            self.result, self.done = end.value, True
        except DeadlinePassed as passed:
            self.stuck, self.done = str(passed), True
        except EngineFailed as error:  # maybe of an engine that the script itself has started
            self.failed, self.done = error, True


def run(scripts: Sequence[Script], all_engines: Callable[[], Sequence[Engine]]) -> None:
    """Run scripts to their ends. `all_engines` returns the engines that have been started so far."""
    while any(not script.done for script in scripts):
        engines = all_engines()
        busy = [engine.advance() for engine in engines]
        for script in scripts:
            if not script.done:
                script.advance()
        if not any(busy):
            _rest(engines)


def _rest(engines: Iterable[Engine]) -> None:
    """Pause, until a call of an engine that is paused is answered. Calls that were queued are sent first."""
    asked = []
    for engine in engines:
        if engine.paused and not (engine.failed or engine.stopped):
            if engine.pending is None and engine.queued:
                engine.advance()
            if engine.pending is not None:
                asked.append(engine.handle.process.connection)
    remote = [one for one in asked if not hasattr(one, "fileno")]  # of engines on nodes, see nodes/place.py
    if not any(one.poll(IDLE_S) for one in remote):
        wait([one for one in asked if one not in remote], 0.0 if remote else IDLE_S)


def play(script: Callable[..., Steps], *handles: EngineHandle) -> Any:
    """Run one script on engines that are up and step only when it says so. Returns its result.

    `script(*engines)`: one engine for each handle; equal handles are one engine. Raises EngineFailed.
    """
    of = {id(one): Engine(one.role, one, started=True, paused=True) for one in handles}
    one = Script(script(*(of[id(handle)] for handle in handles)), ())
    run([one], lambda: list(of.values()))
    if one.failed:
        raise one.failed
    return one.result


# ---- what a script waits with ------------------------------------------------------------------------------


def until(test: Callable[[], Any], deadline: Deadline) -> Steps:
    """Wait until a test is true. Returns whether it became true before the deadline."""
    while not test():
        if deadline.over():
            return False
        yield
    return True


def nothing() -> Steps:
    """Do nothing."""
    yield from ()


def pause(seconds: float) -> Steps:
    """Let the other scripts go on for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


def let_run(seconds: float, *engines: Engine, most: float = math.inf) -> Steps:
    """Let engines, and this process that steps them, run for so many seconds. Time in which they waited for a
    core does not count, so that a busy machine leaves them as much time as an idle one.

    `most`: seconds of the clock after which the wait ends in any case.
    """
    pids = os.getpid(), *(engine.handle.process.watched for engine in engines)
    deadline = Deadline(seconds, pids, look=True)
    end = time.monotonic() + most
    while not deadline.over() and time.monotonic() < end:
        yield


def watching(seconds: float, *engines: Engine) -> Deadline:
    """A deadline in seconds in which these engines did not wait for a core."""
    return Deadline(seconds, tuple({engine.handle.process.watched for engine in engines}))
