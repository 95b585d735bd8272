"""The wait until engines hold nothing, and what they are known to keep.

A connector that keeps blocks for ever would make every scenario wait as long as the first. So the first wait
of a cell is of full length. After it has ended in vain, the cause is established in this cell: what engines
keep is known, and a later wait ends when they hold nothing else, or soon.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from pytest_kvconform.kv_config import TURN_S
from pytest_kvconform.rigs.cluster.engine import Engine, Steps
from pytest_kvconform.rigs.cluster.loop import until, watching
from pytest_kvconform.rigs.engine.handle import EngineHandle
from pytest_kvconform.rigs.engine.messages import EngineSpec, Usage

# For engines that have kept something before. D's lease for a next turn ends; a release takes milliseconds.
SOON_S = TURN_S + 0.05


class Release(NamedTuple):
    """What P and D hold when a scenario is over."""

    usage: tuple[Usage, Usage]
    took_s: float
    waited_s: float  # at most


def until_released(p: Engine, d: Engine, seconds: float, p_may_keep: bool = False) -> Steps:
    """Step both engines until neither holds anything that is not known to be kept, or until time is up.

    `p_may_keep`: what P holds is not waited for. Returns Release.
    """
    began, seconds = time.monotonic(), seconds_to_wait(p.handle, seconds)
    deadline = watching(seconds, p, d)
    while True:
        yield from d.step_beside(p)
        yield from p.step_beside(d)
        usage = (yield from p.call("usage")), (yield from d.call("usage"))
        of_p, of_d = map(_holds_no_more, usage, p.handle.kept or (None, None))
        if of_d and (of_p or p_may_keep):
            break
        if deadline.over():
            note_kept(p.handle, usage, seconds)
            break
        yield
    return Release(usage, time.monotonic() - began, seconds)


def until_quiet(
    p: Engine, d: Engine, seconds: float, mine: frozenset[str], pending: Callable[[], Steps]
) -> Steps:
    """Step both engines until D holds nothing, P none of the requests `mine`, and nothing is `pending`.

    Returns Release.
    """
    began, deadline = time.monotonic(), watching(seconds, p, d)
    while True:
        yield from d.call("step", 0.0)
        yield from p.call("step", 0.0)
        usage = (yield from p.call("usage")), (yield from d.call("usage"))
        free = usage[1].free_blocks == usage[1].total_blocks and not usage[1].unfinished
        held = bool(mine & set(usage[0].requests))
        if (free and not held and not (yield from pending())) or deadline.over():
            if held or not free:
                note_kept(p.handle, usage, seconds)
            return Release(usage, time.monotonic() - began, seconds)


def until_saved(p: Engine, d: Engine, seconds: float) -> Steps:
    """Step both engines of a store until saves in the background hold no blocks, and wait for its
    `save_delay`.
    """
    yield from until_released(p, d, seconds)
    yield from until(lambda: False, watching(p.spec.save_delay, p, d))


def tokens_of_others(spec: EngineSpec) -> int:
    """Tokens of a request that runs on D before it is asked for what was saved; 0: there is none.

    A store with a `save_delay` may learn with the steps of other requests what it has saved: vLLM does not
    step an engine that has no request.
    """
    return 1 if spec.save_delay else 0


def seconds_to_wait(p: EngineHandle, seconds: float) -> float:
    """How long to wait at most for engines to release something."""
    return min(seconds, SOON_S) if p.kept or p.keeps else seconds


def note_kept(p: EngineHandle, usage: tuple[Usage, Usage], seconds: float) -> None:
    """Note what P and D held after a wait in vain."""
    if seconds:
        p.kept = usage


def is_full(p: EngineHandle, needs: int = 0) -> bool:
    """Whether P or D keeps so much that there is soon no room for requests.

    `needs`: blocks on P of the largest transfer, with all its requests; 0: P has room for many.
    """
    if p.kept and p.kept[0].free_blocks < needs:
        return True
    return any(2 * usage.free_blocks < usage.total_blocks for usage in p.kept or ())


def _holds_no_more(usage: Usage, kept: Usage | None) -> bool:
    """Whether an engine holds nothing beyond what it is known to keep."""
    if kept is None:
        return usage.free_blocks == usage.total_blocks and not usage.requests and not usage.unfinished
    return (
        usage.free_blocks >= kept.free_blocks
        and set(usage.requests) <= set(kept.requests)
        and usage.unfinished <= kept.unfinished
    )
