"""What each layer finds in its KV cache at the moment at which its forward reads it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pytest_kvconform.kvspace.pools.addresses import Array
from pytest_kvconform.kvspace.pools.regions import Region
from pytest_kvconform.rigs.bytes.checks import Groups
from pytest_kvconform.rigs.bytes.memory import Memory
from pytest_kvconform.rigs.bytes.messages import StepWork


class LayerLooks:
    """Copies of the blocks of a step's requests, layer by layer.

    To copy them takes so little time that a load which is still under way gains nothing by it. They are
    compared after the forward.
    """

    def __init__(self, memory: Memory, groups: Groups, work: StepWork):
        self.memory, self.groups = memory, groups
        tables = [load.tables for load in work.load_checks]
        self.blocks = [
            np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(table[group] for table in tables)]))
            for group in range(len(groups.layers))
        ]
        self.copies: list[tuple[Region, Array, Array]] = []  # region, its blocks, what they held

    def look(self, layers: Iterable[str]) -> None:
        """Copy what these layers hold now."""
        for name in layers:
            blocks = self.blocks[self.groups.of[name]]
            blocks = blocks[blocks != 0]
            self.memory.fetch(blocks)
            expanded = self.memory.expand(name, blocks)
            for region in self.memory.regions[name]:
                self.copies.append((region, expanded, region.of(self.memory.storage)[expanded]))

    def seen(self) -> Array:
        """The whole storage, uint8 [byte]: the copies where there are any, and else what it holds now."""
        now = self.memory.storage
        self.memory.fetch()
        storage = np.zeros(len(now), now.dtype)  # no page of it is taken before it is written
        for start, end in self.memory.spans or [(0, len(now))]:
            storage[start:end] = now[start:end]
        for region, blocks, rows in self.copies:
            region.of(storage)[blocks] = rows
        return storage
