"""Params with one field corrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GONE = object()  # the key is left out
MUCH = 1 << 62


def _each(value: Any, leaf: Any) -> Any:
    """Return the same nested lists with `leaf` in place of each value that is no list."""
    return [_each(inner, leaf) for inner in value] if isinstance(value, list) else leaf


def _emptied(value: list[Any]) -> list[Any]:
    """Return the outer lists of nested lists, empty.

    These are block ids by KV cache group, with no block in any group.
    """
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
CORRUPT_VALUES = _ANY | {
    "empty": lambda value: "" if isinstance(value, str) else {},
    "fraction": lambda value: 0.5,
}
CORRUPT_LISTS = _ANY | {
    "empty": lambda value: [],
    "emptied": _emptied,
    "texts": lambda value: _each(value, "nonsense"),
    "nulls": lambda value: _each(value, None),
    "shorter": lambda value: value[:-1],
    "longer": lambda value: [*value, *value],
}


def corrupted(params: dict[str, Any], how: str, lists: bool = False) -> dict[str, dict[str, Any]]:
    """Return field -> the params with this field corrupted.

    There is an entry for each field whose value is a list, or for each other field. A field whose value does
    not change is left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for field, value in params.items():
        if isinstance(value, list) != lists:
            continue
        other = (CORRUPT_LISTS if lists else CORRUPT_VALUES)[how](value)
        if other is GONE:
            found[field] = {key: kept for key, kept in params.items() if key != field}
        elif other != value or type(other) is not type(value):
            found[field] = params | {field: other}
    return found
