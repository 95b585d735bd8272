"""Wrong blocks are read from P, or written on D."""

from __future__ import annotations

from typing import Any

from .right import Right


class Reads(Right):
    """`choose` says which of P's blocks are read into which of D's."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for meta in self.loads().values():
            if any(meta.local_block_ids):
                chosen = [
                    self.choose(list(ours), list(theirs))
                    for ours, theirs in zip(meta.local_block_ids, meta.remote.block_ids, strict=True)
                ]
                meta.local_block_ids, meta.remote.block_ids = (
                    tuple(groups) for groups in zip(*chosen, strict=True)
                )
        super().start_load_kv(forward_context, **kwargs)

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        raise NotImplementedError


class MovesNothing(Right):
    """Reports to P and vLLM that everything was read, and reads nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for meta in self.loads().values():
            meta.local_block_ids = ()  # as after a full hit in D's own cache
        super().start_load_kv(forward_context, **kwargs)


class LateByOne(Reads):
    """Reads P's block i + 1 into D's block i."""

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return ours, theirs[1:] + theirs[-1:]


class DropsTail(Reads):
    """Does not read the last block."""

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return ours[:-1], theirs[:-1]


class SwapsBlocks(Reads):
    """Exchanges the first two blocks."""

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return ours, theirs[1::-1] + theirs[2:]


class WritesNull(Reads):
    """Writes one block too many: the null block."""

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return [0, *ours], [theirs[0], *theirs]


class WritesOutside(Reads):
    """Writes one block too many: one that belongs to no request."""

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return [next(b for b in range(1, 200) if b not in ours), *ours], [theirs[0], *theirs]


class HalfAWindow(Reads):
    """Reads only the last block of a sliding window, as if every window began at a block."""

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return (ours[-1:], theirs[-1:]) if len(ours) == 2 else (ours, theirs)
