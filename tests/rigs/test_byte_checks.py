"""A pool is compared again if a load was writing to it, and only then. Of a GPU's memory there is a copy."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pytest_kvconform.rigs.bytes import checks
from pytest_kvconform.rigs.bytes.memory import Memory


@pytest.mark.parametrize(("writes", "looks"), [(0, 1), (2, 3), (9, checks.LOOKS)])
def test_another_look_while_a_load_is_written(
    monkeypatch: pytest.MonkeyPatch, writes: int, looks: int
) -> None:
    pages = np.zeros((2, 4, 8), dtype=np.uint8)  # storage and shadow: blocks of 8 bytes
    memory: Any = SimpleNamespace(
        storage=pages[0].reshape(-1),
        shadow=pages[1].reshape(-1),
        engine=1,
        rank=0,
        dirty=np.zeros(4, dtype=bool),
        spans=(),
    )
    memory.page_views = lambda of: [of.reshape(4, 8)]
    memory.held, memory.fetch, memory.accept_all = lambda *_: {}, lambda _: None, lambda: None
    memory.accept = partial(Memory.accept, memory)
    memory.still_as_accepted = partial(Memory.still_as_accepted, memory)
    memory.regions = {}
    seen: list[int] = []

    def compare_pool(*_: Any, **__: Any) -> Any:
        seen.append(1)
        if len(seen) <= writes:
            memory.storage[8:16] = len(seen)  # block 1, by another process
        return SimpleNamespace(wrong=1, rows={}, words={})

    monkeypatch.setattr(checks, "compare_pool", compare_pool)
    groups: Any = SimpleNamespace(of={})
    checks.PoolChecker(memory, groups)._compare(np.zeros(4), {}, None, np.array([1]))
    assert len(seen) == looks


class Copied(Memory):
    """A pool of four blocks with two pages each, as if it were on a GPU."""

    copied = True  # type: ignore[assignment]

    def __init__(self) -> None:
        self.device, self.storage = torch.zeros(64, dtype=torch.uint8), np.zeros(64, dtype=np.uint8)
        self.pages = [(0, 8, 8), (32, 8, 8)]  # offset of block 0, bytes, stride


def test_blocks_go_to_the_device_and_back() -> None:
    memory = Copied()
    memory.storage[:] = np.arange(64)
    memory.flush(np.array([2, 0, 2]))
    flushed = memory.device.numpy().copy()
    due = np.where(np.isin(np.arange(64) // 8 % 4, (0, 2)), np.arange(64), 0)
    np.testing.assert_array_equal(flushed, due)

    memory.device[:] = 99
    memory.fetch(np.array([1]))
    np.testing.assert_array_equal(memory.storage, np.where(np.arange(64) // 8 % 4 == 1, 99, np.arange(64)))
    memory.fetch(np.zeros(0, dtype=np.int64))  # no block
    memory.fetch()
    assert (memory.storage == 99).all()


def test_a_copy_of_an_earlier_moment_is_not_fetched_anew() -> None:
    memory = Copied()
    memory.device[:] = 99
    with memory.held_before(np.ones(64, dtype=np.uint8)):
        memory.fetch()
        assert (memory.storage == 1).all()
    memory.fetch()
    assert (memory.storage == 99).all()
