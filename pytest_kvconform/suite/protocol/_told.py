"""Whether D's scheduler half has its workers tell P that its blocks are not needed any more. How it says so is its own affair; that it says
of P's request what it does not say while the request waits can be seen in the metadata.
"""

from __future__ import annotations

from typing import Any

from pytest_kvconform.rigs.scheduler.leaks import mentions, walk
from pytest_kvconform.rigs.scheduler.rig import Side, Step

SHORTEST = 8  # of a word that can stand for one engine or one request
SAME = "cmpl-same-0000"  # id of D's request on both sides that are compared


def words(params: dict[str, Any]) -> frozenset[str]:
    """What of P's params can be found again: ids of its engine and of its request."""
    return frozenset(value for _, value in walk(params) if isinstance(value, str) and len(value) >= SHORTEST)


def places(steps: list[Step], names: frozenset[str]) -> frozenset[str]:
    """Where in the metadata of these steps P's words stand."""
    return frozenset(place for step in steps for name in names for place in mentions(step.metadata, name))


def while_it_waits(d: Side, prompt: tuple[int, ...], params: dict[str, Any]) -> frozenset[str]:
    """Where P's words stand as long as D has no block for the request: renewals of a lease, for one. The engine is of no use afterwards."""
    d.starve()
    d.add(prompt, params, id=SAME)
    return places([d.step() for _ in range(2)], words(params))


def let_go(d: Side, params: dict[str, Any], waiting: frozenset[str]) -> bool:
    """Whether some step of D says of P's request what no step says while it waits."""
    return not places(d.steps, words(params)) <= waiting
