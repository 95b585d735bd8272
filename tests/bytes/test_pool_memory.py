"""The memory of pools begins as it should, and belongs to one engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pytest_kvconform.kvspace.pools.poison import WRAP, poison_bytes
from pytest_kvconform.rigs.bytes import pool_memory

SIZE = WRAP + 4096 * 3 + 24  # the poison begins once more, and ends within a page


@pytest.fixture(params=[*["mapped"] * hasattr(os, "memfd_create"), "no os.memfd_create", "refused"])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(name: str) -> int:
        raise PermissionError(name)

    pool_memory.poison_file.cache_clear()
    if request.param == "refused":
        monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    elif request.param != "mapped":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    yield
    assert (pool_memory.poison_file(1) is not None) == (request.param == "mapped")
    pool_memory.poison_file.cache_clear()


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("engine", [0, 1])
def test_it_begins_as_the_poison_of_its_engine(engine: int) -> None:
    memory = np.frombuffer(pool_memory.poison(SIZE, engine), dtype=np.uint8)
    assert np.array_equal(memory, poison_bytes(0, SIZE, engine))


@pytest.mark.usefixtures("_kind")
def test_what_is_written_is_seen_by_nobody_else() -> None:
    mine, others = (np.frombuffer(pool_memory.poison(SIZE, 1), dtype=np.uint8) for _ in range(2))
    mine[[0, WRAP, SIZE - 1]] = 1
    assert np.flatnonzero(mine != others).tolist() == [0, WRAP, SIZE - 1]
    assert np.array_equal(others, poison_bytes(0, SIZE, 1))


def test_vllms_pools_are_made_of_it_and_nothing_else_is() -> None:
    others = []
    with pool_memory.pools_of(lambda size: pool_memory.poison(size, 0)) as made:
        pool = torch.zeros(SIZE, dtype=torch.int8, device="cpu")
        others += [torch.zeros(64), torch.zeros(8, 8, dtype=torch.int8), torch.zeros((8,), dtype=torch.int8)]
        others += [torch.zeros(8, dtype=torch.int8, requires_grad=False)]
        thread = threading.Thread(target=lambda: others.append(torch.zeros(64, dtype=torch.int8)))
        thread.start()
        thread.join()
    assert made == [SIZE] and np.array_equal(pool.numpy().view(np.uint8), poison_bytes(0, SIZE, 0))
    others += [torch.zeros(64, dtype=torch.int8)]
    assert len(others) == 6 and not any(other.any() for other in others)
