"""What the objects of a connector hold. Their classes are unknown, so `walk` visits every object that it can
reach.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from pytest_kvconform.result import attribute_of, repr_of
from pytest_kvconform.rigs.tap import WRAPPED

# Modules whose objects the walk does not enter: a connector may hold the engine's configuration and cache
# manager, which are not its own.
NOT_OURS = (
    "vllm.config",
    "vllm.v1.core",
    "vllm.v1.kv_cache_interface",
    "transformers",
    "torch",
    "threading",
    "logging",
    "_thread",
    "zmq",
)
DEEP, MANY = 12, 200_000  # levels and objects of one walk
Path = tuple[str, ...]
# What vLLM's server appends to an id, and connectors cut off (`get_base_request_id`, nixl/utils.py).
_OWN_WORD = re.compile(r"-[0-9a-f]{8}$")


def walk(root: Any, skip: Callable[[Any], bool] = lambda value: False) -> Iterator[tuple[Path, Any]]:
    """(path, value) of every string, number and None within an object, through containers and attributes.

    Does not enter what `skip` says True of.
    """
    seen: set[int] = set()
    todo: list[tuple[Path, Any]] = [((), root)]
    for _ in range(MANY):
        if not todo:
            return
        path, value = todo.pop()
        if value is None or isinstance(value, (str, bytes, int, float)):
            yield path, value
            continue
        if id(value) in seen or len(path) > DEEP or skip(value):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            items = list(value.items())  # at once: threads of the connector may change it
            todo += [((*path, "key"), key) for key, _ in items]
            words = [str.__str__(key) if isinstance(key, str) else repr_of(key) for key, _ in items]
            todo += [((*path, word), inner) for word, (_, inner) in zip(words, items, strict=True)]
        elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
            todo += [((*path, "item"), inner) for inner in list(value)]
        elif isinstance(value, range):
            todo += [((*path, "item"), inner) for inner in value[:MANY]]
        elif type(value).__name__ == "ndarray":
            todo += [((*path, "item"), inner) for inner in value.ravel().tolist()]
        elif not is_not_ours(value):
            todo += [((*path, name), inner) for name, inner in attributes(value)]


def is_not_ours(value: Any) -> bool:
    """Whether `walk` does not enter an object: a class, a function, or an object of the engine's."""
    kinds = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    return isinstance(value, kinds) or str(type(value).__module__).startswith(NOT_OURS)


def has_limit(value: Any) -> bool:
    """Whether an object is a container that never holds more than a number of things."""
    limits = [attribute_of(value, name) for name in ("maxlen", "maxsize")]
    holds = hasattr(type(value), "__len__") or attribute_of(value, "qsize") is not None
    return holds and any(isinstance(limit, int) and limit > 0 for limit in limits)


def attributes(value: Any) -> list[tuple[str, Any]]:
    """Name and value of every attribute that an object itself has."""
    names = [
        *(attribute_of(value, "__dict__") or ()),
        *(name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())),
    ]
    found = [
        (name, attribute_of(value, name, names)) for name in dict.fromkeys(names) if isinstance(name, str)
    ]
    return [(name, one) for name, one in found if one is not names]


def mentions(root: Any, word: str) -> tuple[str, ...]:
    """Places within an object where a string is, or is part of, a string: "reqs_to_recv.key"."""
    return tuple(
        sorted({".".join(path) for path, value in walk(root) if isinstance(value, str) and word in value})
    )


def state_of(connector: Any) -> dict[str, Any]:
    """Attributes of a half of the connector, without those that vLLM passed to it, and that of `around`."""
    given = ("_vllm_config", "_kv_transfer_config", "_kv_cache_config", "_kv_cache_manager", WRAPPED)
    return {name: value for name, value in vars(connector).items() if name not in given}


def named(state: dict[str, Any], ids: set[str]) -> dict[str, int]:
    """Place within the attributes of an object -> how many of these requests are named there. "*" stands for
    a key of a dict that is an id or a number. A container with a limit of its own, such as a deque with a
    maxlen, does not count.
    """
    if not ids:
        return {}
    names = {_OWN_WORD.sub("", id): id for id in ids} | {id: id for id in ids}
    found: dict[str, set[str]] = {}
    for path, value in walk(state, skip=has_limit):
        if not isinstance(value, str):
            continue
        if mine := {names[value]} if value in names else {id for id in ids if id in value}:
            place = ".".join(part if is_word(part) else "*" for part in path)
            found.setdefault(place, set()).update(mine)
    return {place: len(requests) for place, requests in found.items()}


def is_word(part: str) -> bool:
    """Whether a part of a path is a name in the connector's code, and no id and no number."""
    return part.isidentifier() and not any(map(str.isdigit, part))
