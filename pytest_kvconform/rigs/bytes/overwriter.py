"""Requests that overwrite freed blocks, as other requests do on a busy engine.

A block that is free stays as it is until vLLM gives it to another request. So blocks are overwritten by a
request that vLLM's scheduler admits: the connector is asked about it, the KV cache manager allocates its
blocks, and a step writes them. A connector that reads blocks until they are given away
(`BlockPool.unpin_blocks`), or that saves them in the step that overwrites them, is right.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_kvconform.rigs.bytes.messages import ByteRequest
from pytest_kvconform.rigs.scenario import tokens

if TYPE_CHECKING:
    from pytest_kvconform.rigs.bytes.process import ByteEngineProcess

NUMBERS = range(200, 256)  # owners of the words that overwrite
STATE_BLOCKS = 2  # of a request, at most, in a group of layers that keep a state


class Overwriter:
    """Overwrites the blocks that an engine frees, while it is on."""

    def __init__(self, engine: ByteEngineProcess):
        self.engine, self.on = engine, False
        self.freed: set[int] = set()  # blocks that nobody has overwritten since
        self.written: set[int] = set()  # blocks of requests of this class
        self.unfinished: set[str] = set()  # requests of this class whose last step was not scheduled yet
        self.numbers = itertools.cycle(NUMBERS)
        self.names = itertools.count()

    def turn(self, on: bool) -> None:
        """Overwrite what is freed from now on, or stop."""
        self.on = on
        self.freed.clear()

    def note_freed(self, blocks: set[int]) -> None:
        """Note blocks that were freed. Those of the own requests hold nothing that anybody reads."""
        if self.on:
            self.freed |= blocks - self.written
        self.written -= blocks

    def note_scheduled(self, request_id: str, blocks: set[int], last: bool) -> None:
        """Note the blocks of a request that a step computes. `last`: the step computes the end of it."""
        self.freed -= blocks
        if request_id in self.unfinished:  # each of its steps may give it blocks
            self.written |= blocks
            if last:
                self.unfinished.discard(request_id)

    @property
    def idle(self) -> bool:
        """Whether everything that was freed has been overwritten."""
        return not self.freed and not self.unfinished

    def admit(self) -> None:
        """Add a request that is given freed blocks in the next step. They are the next that the pool gives.

        What does not fit into one request is for the next step.
        """
        pool = self.engine.manager.block_pool
        blocks = [pool.blocks[block] for block in sorted(self.freed)]
        self.freed = {block.block_id for block in blocks if not block.ref_cnt}
        if not self.freed or self.unfinished:
            return
        queue = pool.free_block_queue
        for block in (free := [block for block in blocks if not block.ref_cnt]):
            queue.remove(block)
        queue.prepend_n(free)
        if length := self._length(len(free), pool.get_num_free_blocks()):
            request = self._request(length)
            self.unfinished.add(request.id)
            self.engine.add(request)

    def _length(self, wanted: int, free: int) -> int:
        """Tokens of a request that gets so many blocks, each of them filled. 0: the pool has not enough."""
        sizes = [group.block_size for group in self.engine.groups if group.kind == "attention"]
        whole = math.lcm(*sizes)
        states = STATE_BLOCKS * (len(self.engine.groups) - len(sizes))
        each = sum(whole // size for size in sizes)
        fits = min((free - states) // each, (self.engine.spec.max_model_len - 1) // whole)
        return whole * max(0, min(math.ceil(wanted / each), fits))

    def _request(self, length: int) -> ByteRequest:
        number, name = next(self.numbers), f"another-{next(self.names)}"
        return ByteRequest(
            id=name,
            tokens=tokens(length, seed=number),
            max_tokens=1,
            kv_transfer_params=None,
            salt=name,
            watch=False,
            owners=np.full(length, number),
            number=number,
        )


def blocks_of(tables: tuple[Any, ...]) -> set[int]:
    """The blocks of block tables, without the null block."""
    return {int(block) for table in tables for block in table if block}
