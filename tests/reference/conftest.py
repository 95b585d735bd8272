"""Fixtures: engines of one worker each, on a transport within one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.reference.doubles import Wire, WorkerEngine


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def make(wire: Wire) -> Iterator[Callable[..., WorkerEngine]]:
    made: list[WorkerEngine] = []

    def engine(*args: object, **kwargs: object) -> WorkerEngine:
        made.append(WorkerEngine(wire, *args, **kwargs))
        return made[-1]

    yield engine
    for one in made:
        one.close()
