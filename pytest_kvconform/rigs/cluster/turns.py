"""Parts of scripts on engines that step by turns: what happens in which order is the same in every run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pytest_kvconform.rigs.cluster.engine import Engine, Steps
from pytest_kvconform.rigs.engine.messages import Unfinished
from pytest_kvconform.rigs.processes.cores import Deadline


def both(p: Engine, d: Engine, name: str, *arguments: Any) -> Steps:
    """One call on both engines at once. Returns the two answers; equal ones if P is D."""
    calls = [engine.queue(name, *arguments) for engine in dict.fromkeys((p, d))]
    for engine, call in zip((p, d), calls, strict=False):
        yield from engine.answer(call)
    return calls[0].answer, calls[-1].answer


def step_both(first: Engine, second: Engine, done: Callable[[], Steps], deadline: Deadline) -> Steps:
    """Step engines in turn until `done()`. Returns whether it came true in time."""
    while not (yield from done()):
        if deadline.over():
            return False
        yield from first.step_beside(second)
        yield from second.step_beside(first)
    return True


def until_finished(
    engine: Engine, peer: Engine, names: Iterable[str], deadline: Deadline, poll_s: float = 0.0
) -> Steps:
    """Step both engines until requests of the first have ended.

    `poll_s`: for which the first engine steps until a step does something. Requests that have not ended by
    the deadline are aborted. Returns them as Unfinished.
    """
    names = list(names)

    def waiting() -> list[str]:
        return [name for name in names if name not in engine.ends]

    while waiting():
        yield from engine.step_beside(peer, seconds=poll_s)
        if waiting():
            yield from peer.step_beside(engine)
        if (left := waiting()) and deadline.over():
            stuck = []
            for name in sorted(left):
                stuck.append(Unfinished(engine.role, (yield from engine.call("trace", name)).status))
            for name in left:
                yield from engine.call("abort", name)
            return tuple(stuck)
    return ()
