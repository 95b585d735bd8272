"""One rank's judgement: what a load owes, and what stands in the whole pool instead."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import numpy as np

from pytest_kvconform.kvspace.address import ATTENTION, Array, Region, decode
from pytest_kvconform.kvspace.pool import compare_pool
from pytest_kvconform.rigs.pattern_memory import Memory
from pytest_kvconform.rigs.pattern_messages import Check, Judge, Missing, Work


@dataclass(frozen=True)
class Groups:
    """The KV cache groups of an engine, and where in the block tables a token is found."""

    layers: tuple[tuple[str, ...], ...]  # per group
    block_sizes: tuple[int, ...]  # tokens, per group
    states: frozenset[str]  # layers that keep a state
    windows: dict[str, int]  # layer -> tokens of its sliding window; 0: all
    of: dict[str, int]  # layer -> group, in the order of the model

    def is_state(self, group: int) -> bool:
        return self.layers[group][0] in self.states

    def state_slot(self, table: Array, tokens: int, group: int) -> int:
        """The block that holds the state after `tokens` tokens; 0: none.

        Without prefix caching a request has one. Otherwise (mamba_cache_mode "align", v1/worker/mamba_utils.py) a state stays in the block
        in which its last token lies, and the next step goes on from there, in the next block if that one is full.
        """
        return int(table[min((max(tokens, 1) - 1) // self.block_sizes[group], len(table) - 1)]) if len(table) else 0


class Inspector:
    """Keeps the checks of one rank."""

    def __init__(self, memory: Memory, groups: Groups):
        self.memory, self.groups = memory, groups
        self.regions = [region for of_layer in memory.regions.values() for region in of_layer]
        self.checks: list[Check] = []
        self.failed: set[int] = set()  # blocks whose load the connector reported as failed, until a check has said so

    def judge(self, work: Work) -> None:
        """Compare everything with what should be there, now that the loads of some requests are said to be complete."""
        self.memory.fetch()
        for judge in work.judge:
            started = time.perf_counter()
            self.memory.forgive(work.loading)
            rows, size, due, missing = self._expect(judge)
            first = {group: table[table != 0] for group, table in enumerate(judge.tables)}
            check = self._compare(work.groups, first, due)
            seconds = time.perf_counter() - started
            loaded = replace(check, request=judge.request, local=judge.local, computed=judge.computed, seconds=seconds)
            self.checks.append(replace(loaded, rows_due=rows, bytes_due=size, missing=tuple(missing)))

    def audit(self, groups: Array, loading: Array) -> Check:
        """Compare everything now. `groups`: per block the group whose content it has; `loading`: blocks that loads may write."""
        started = time.perf_counter()
        self.memory.fetch()
        self.memory.forgive(loading)
        return replace(self._compare(groups, {}, None), seconds=time.perf_counter() - started)

    def taken(self, request: str) -> list[Check]:
        """The checks of a request's loads, once."""
        mine = [check for check in self.checks if check.request == request]
        self.checks = [check for check in self.checks if check.request != request]
        return mine

    def _compare(self, groups: Array, first: dict[int, Array], due: dict[str, Array] | None) -> Check:
        """Compare the whole storage. What is found is reported once: from here on it is what should be there."""
        memory = self.memory
        held = memory.held(self.groups.of, groups, first)
        pool = compare_pool(memory.storage, memory.shadow, self.regions, held, due=due)
        if pool.wrong or pool.rows:
            memory.adopt()
        return Check(rank=memory.rank, pool=pool)

    def _expect(self, judge: Judge) -> tuple[int, int, dict[str, Array], list[Missing]]:
        """Put what is due into the shadow. Returns rows and bytes of it, its blocks as the layers' regions count them, what is missing."""
        memory, groups, rows, size = self.memory, self.groups, 0, 0
        due: dict[str, Array] = {}
        missing: dict[int, tuple[int, tuple[int, ...]]] = {}  # group -> window, tokens
        for name, group in groups.of.items() if judge.computed > judge.local else ():
            table, window = judge.tables[group], groups.windows[name]
            if name in groups.states:
                slot = groups.state_slot(table, judge.computed, group)
                if not slot:
                    missing[group] = 0, (judge.computed,)
                    continue
                for region in memory.regions[name]:
                    memory.write_state((memory.shadow,), region, slot, int(judge.owners[-1]), judge.computed, 0)
                    rows, size = rows + region.shape[1], size + region.shape[1] * region.width
                due[name] = np.array([slot])
                continue
            tokens = np.arange(max(judge.local, judge.computed - window + 1 if window else 0), judge.computed)
            blocks = table[tokens // groups.block_sizes[group]]
            if not blocks.all():
                missing[group] = window, tuple(tokens[blocks == 0].tolist())
            tokens, blocks = tokens[blocks != 0], blocks[blocks != 0]
            if len(tokens):
                (region,) = memory.regions[name]
                for piece, rank in self._sources(region, int(blocks[0]), int(tokens[0])):
                    memory.write_tokens((memory.shadow,), piece, blocks, tokens, judge.owners[tokens], 0, rank)
                due[name] = memory.expand(name, np.unique(blocks))
                rows, size = rows + len(tokens) * region.shape[2] * region.shape[3], size + len(tokens) * int(np.prod(region.shape[2:]))
        said = [
            Missing(group, groups.layers[group], window, groups.block_sizes[group], tokens)
            for group, (window, tokens) in sorted(missing.items())
        ]
        return rows, size, due, said

    def _sources(self, region: Region, block: int, token: int) -> list[tuple[Region, int]]:
        """The region cut into heads that came from one rank of P each, with that rank, as the row of one token says.

        Which of the ranks that have a row it came from does not matter; guessing it right is what makes the comparison fast.
        """
        ratio = region.shape[0] // self.memory.num_blocks
        at = block * ratio + token % (region.block_size * ratio) // region.block_size
        row = region.of(self.memory.storage)[at, token % region.block_size, :, 0, :8]
        found = decode(np.ascontiguousarray(row).view(np.uint64)[:, 0])
        ranks = np.where((found["kind"] == ATTENTION) & (found["rank"] >= 0), found["rank"], 0)
        starts = [0, *(np.flatnonzero(np.diff(ranks)) + 1).tolist(), len(ranks)]
        pieces = []
        for start, end in itertools.pairwise(starts):
            shape = (*region.shape[:2], end - start, *region.shape[3:])
            offset = region.offset + start * region.strides[2]
            pieces.append((replace(region, offset=offset, shape=shape, first=region.first + start), int(ranks[start])))
        return pieces
