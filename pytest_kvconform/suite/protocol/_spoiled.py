"""Values that kv_transfer_params must be expected to have: they come through HTTP and through routers that other people write.

Tables of words, each of which makes one value of another; they know nothing of any connector's keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GONE = object()  # the key is left out
MUCH = 1 << 62


def _each(value: Any, leaf: Any) -> Any:
    """The same lists, with another value in place of each that is none."""
    return [_each(inner, leaf) for inner in value] if isinstance(value, list) else leaf


def _emptied(value: list[Any]) -> list[Any]:
    """Lists of lists keep the outer ones: block ids by KV cache group, and no block in any group."""
    return [_emptied(inner) for inner in value if isinstance(inner, list)]


_ANY: dict[str, Callable[[Any], Any]] = {
    "missing": lambda value: GONE,
    "null": lambda value: None,
    "text": lambda value: "nonsense",
    "number": lambda value: 7,
    "flag": lambda value: not value,
    "list": lambda value: ["nonsense"],
    "object": lambda value: {"nonsense": [1]},
    "negative": lambda value: _each(value, -1),
    "huge": lambda value: _each(value, MUCH),
    "hostile": lambda value: "\x00../\n" * 4096,
}
OF_VALUES = _ANY | {
    "empty": lambda value: "" if isinstance(value, str) else {},
    "fraction": lambda value: 0.5,
}
OF_LISTS = _ANY | {
    "empty": lambda value: [],
    "emptied": _emptied,
    "texts": lambda value: _each(value, "nonsense"),
    "nulls": lambda value: _each(value, None),
    "shorter": lambda value: value[:-1],
    "longer": lambda value: [*value, *value],
}


def spoiled(params: dict[str, Any], how: str, lists: bool = False) -> dict[str, dict[str, Any]]:
    """Field -> the params with this field spoiled: those whose value is a list, or all others. What has the value already is left out."""
    found: dict[str, dict[str, Any]] = {}
    for field, value in params.items():
        if isinstance(value, list) != lists:
            continue
        other = (OF_LISTS if lists else OF_VALUES)[how](value)
        if other is GONE:
            found[field] = {key: kept for key, kept in params.items() if key != field}
        elif other != value or type(other) is not type(value):
            found[field] = params | {field: other}
    return found
