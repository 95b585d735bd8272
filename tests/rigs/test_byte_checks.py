"""A pool is compared again if a load was writing to it, and only then."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

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
