"""What the halves of a connector remember: how many things their containers hold, and what stays open."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from typing import Any

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.engine.objects import DEEP, MANY, attributes, has_limit, is_not_ours, state_of

SHARE = 0.4  # a container that grows by so many things a request grows with all requests, or half of them
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
HOLDS_NOTHING = (str, bytes, int, float, type(None))


def sizes_of(halves: dict[str, Any]) -> dict[str, int]:
    """`container_sizes` of the halves of a connector in this process, by "half: place", and how many files
    the process has open: Linux limits them, and a step that gets no more raises. Those of /proc are left out:
    the harness has some for threads.
    """
    files = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder is closed again
            files += not os.readlink(f"/proc/self/fd/{name}").startswith("/proc/")
    found = {
        f"{half}: {place}": size
        for half, connector in halves.items()
        for place, size in container_sizes(state_of(connector)).items()
    }
    return found | {"process: table of open files": files}


def container_sizes(state: dict[str, Any], most: int = MANY) -> dict[str, int]:
    """Place within the attributes of an object -> how many things the containers hold that are there.

    Members of a container have one place, so a dict of many lists has two: its own, and that of the lists. A
    container with a limit of its own, such as a deque with a maxlen, does not count. Raises Blocked if there
    are too many objects to look at: a container that was not reached is not empty.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[tuple[tuple[str, ...], Any]] = [((name,), value) for name, value in state.items()]
    for _ in range(most):
        if not todo:
            return dict(found)
        path, value = todo.pop()
        if id(value) in seen or len(path) > DEEP:
            continue
        seen.add(id(value))
        if has_limit(value):
            continue
        if isinstance(value, CONTAINERS):
            found[".".join(path)] += len(value)
            inner = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
            todo += [((*path, "*"), one) for one in inner if not isinstance(one, HOLDS_NOTHING)]
        elif isinstance(number := _queued(value), int):
            found[".".join(path)] += number
        elif not is_not_ours(value):
            inside = attributes(value)
            todo += [((*path, name), one) for name, one in inside if not isinstance(one, HOLDS_NOTHING)]
    raise Blocked(f"the connector remembers more than {most} objects, and what has grown cannot be told")


def _queued(value: Any) -> Any:
    """How many things a queue holds; None of what is no queue."""
    try:
        return value.qsize()
    except Exception:  # of an object of the connector
        return None


def growth(before: dict[str, int], after: dict[str, int], requests: int) -> str:
    """One sentence about the container that has grown most, "" if none has grown with the requests."""
    grown = {place: size - before.get(place, 0) for place, size in after.items()}
    place = max(grown, key=lambda place: grown[place], default="")
    if not place or grown[place] < SHARE * requests:
        return ""
    return f"{place} holds {after[place]} things, {grown[place]} more than {requests} requests ago"
