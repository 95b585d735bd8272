"""What the halves of a connector remember is counted by place, and growth is named."""

from __future__ import annotations

import collections
import queue
from typing import Any

import pytest

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.engine.objects import mentions
from pytest_kvconform.rigs.engine.sizes import container_sizes, growth


class Half:
    """An object with attributes and slots, and with itself among them."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {"a": [1, 2], "b": [3]}
        self.recent = collections.deque([[1]], maxlen=2)
        self.last = collections.deque([1])
        self.todo: queue.Queue[int] = queue.Queue()
        self.todo.put(1)
        self.me = self


def test_places_are_those_of_attributes_and_not_of_keys() -> None:
    assert container_sizes({"half": Half()}) == {
        "half.requests": 2,
        "half.requests.*": 3,
        "half.last": 1,
        "half.todo": 1,
    }


def test_growth_is_four_things_for_ten_requests() -> None:
    assert growth({"a": 100}, {"a": 139, "b": 1}, 100) == ""
    assert growth({}, {}, 100) == ""
    assert growth({"a": 100}, {"a": 140, "b": 1}, 100) == "a holds 140 things, 40 more than 100 requests ago"


def test_what_was_not_reached_is_not_empty() -> None:
    halves = {"half": [[1] for _ in range(100)], "numbers": list(range(1000))}
    assert container_sizes(halves, most=110) == {"half": 100, "half.*": 100, "numbers": 1000}
    with pytest.raises(Blocked, match="more than 90 objects, and what has grown cannot be told"):
        container_sizes(halves, most=90)


class Sly:
    """An object of which nothing can be asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} yet")


def test_objects_of_a_connector_may_raise_when_they_are_looked_at() -> None:
    state = {"half": {"sly": Sly(), "ids": ["cmpl-7"]}}
    assert container_sizes(state) == {"half": 2, "half.*": 1}
    assert mentions(state, "cmpl-7") == ("half.ids.item",)
