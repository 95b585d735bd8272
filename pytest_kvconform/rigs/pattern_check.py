"""One rank's judgement: what a load owes, and what stands in the whole pool instead."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import numpy as np

from pytest_kvconform.kvspace.address import ATTENTION, Array, Region, decode
from pytest_kvconform.kvspace.compare import UNWRITTEN
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


@dataclass(frozen=True)
class Lack:
    """Bytes that were due at the check of a request and had not been written."""

    where: Array  # bool [byte] of the storage, eight to a byte
    want: Array  # uint8, what was due there
    held: dict[str, Array]  # as `compare_pool` had them
    due: dict[str, Array]


class Inspector:
    """Keeps the checks of one rank."""

    def __init__(self, memory: Memory, groups: Groups, store: bool = False):
        self.memory, self.groups, self.store = memory, groups, store
        self.regions = [region for of_layer in memory.regions.values() for region in of_layer]
        self.checks: list[Check] = []
        self.lacks: dict[str, Lack] = {}  # request -> what a second look is to find
        self.failed: set[int] = set()  # blocks whose load the connector reported as failed, until a check has said so

    def judge(self, work: Work) -> None:
        """Compare everything with what should be there, now that the loads of some requests are said to be complete."""
        self.memory.fetch()
        for judge in work.judge:
            started = time.perf_counter()
            self.memory.forgive(work.loading)
            rows, size, due, missing = self._expect(judge)
            first = {group: table[table != 0] for group, table in enumerate(judge.tables)}
            check = self._compare(work.groups, first, due, judge.request)
            seconds = time.perf_counter() - started
            loaded = replace(check, request=judge.request, local=judge.local, computed=judge.computed, seconds=seconds)
            self.checks.append(replace(loaded, rows_due=rows, bytes_due=size, missing=tuple(missing)))

    def audit(self, groups: Array, loading: Array) -> Check:
        """Compare everything now. `groups`: per block the group whose content it has; `loading`: blocks that loads may write."""
        started = time.perf_counter()
        self.memory.fetch()
        self.memory.forgive(loading)
        late = self._second_look()
        return replace(self._compare(groups, {}, None), late=late, seconds=time.perf_counter() - started)

    def taken(self, request: str) -> list[Check]:
        """The checks of a request's loads, once."""
        mine = [check for check in self.checks if check.request == request]
        self.checks = [check for check in self.checks if check.request != request]
        return mine

    def _compare(self, groups: Array, first: dict[int, Array], due: dict[str, Array] | None, request: str = "") -> Check:
        """Compare the whole storage. What is found is reported once: from here on it is what should be there."""
        memory = self.memory
        held = memory.held(self.groups.of, groups, first)
        pool = compare_pool(memory.storage, memory.shadow, self.regions, held, due=due, engine=memory.engine)
        if due is not None and pool.words.keys() == {UNWRITTEN}:
            where = memory.storage != memory.shadow
            self.lacks[request] = Lack(np.packbits(where), memory.shadow[where], held, due)
        if pool.wrong or pool.rows:
            memory.adopt()
        return Check(rank=memory.rank, pool=pool)

    def _second_look(self) -> tuple[str, ...]:
        """Requests that lacked words at their check and now have them all; from here on these are what should be there."""
        memory, late = self.memory, []
        for request, lack in self.lacks.items():
            where = np.unpackbits(lack.where, count=len(memory.storage)).view(bool)
            should = memory.shadow.copy()
            should[where] = lack.want
            if not compare_pool(memory.storage, should, self.regions, lack.held, due=lack.due, ignore=~where).wrong:
                memory.shadow[where] = memory.storage[where]
                late.append(request)
        self.lacks.clear()
        return tuple(late)

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
                    word = np.zeros((1, 8), dtype=np.uint8)
                    word[0, : min(8, region.width)] = region.of(memory.storage)[slot, 0, :8]
                    (engine,) = self._computed_by(decode(word.view(np.uint64)[0], min(8, region.width))["engine"])
                    memory.write_state((memory.shadow,), region, slot, int(judge.owners[-1]), judge.computed, int(engine))
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
                engines = self._computed_by(self._first_words(region, blocks, tokens)[:, 0]["engine"])
                for engine in np.unique(engines).tolist():
                    some = engines == engine
                    for piece, rank in self._sources(region, blocks[some][:1], tokens[some][:1]):
                        memory.write_tokens((memory.shadow,), piece, blocks[some], tokens[some], judge.owners[tokens[some]], engine, rank)
                due[name] = memory.expand(name, np.array(list(dict.fromkeys(blocks.tolist()))))
                rows, size = rows + len(tokens) * region.shape[2] * region.shape[3], size + len(tokens) * int(np.prod(region.shape[2:]))
        said = [
            Missing(group, groups.layers[group], window, groups.block_sizes[group], tokens)
            for group, (window, tokens) in sorted(missing.items())
        ]
        return rows, size, due, said

    def _computed_by(self, engines: Array) -> Array:
        """Which engine has to have computed rows of which `engines` stand there: P, but a store may give D back what D itself has saved."""
        return np.where(self.store & (engines == 1), 1, 0)

    def _first_words(self, region: Region, blocks: Array, tokens: Array) -> Array:
        """What the first word of every head's first plane says: COORDINATES [token, head]."""
        ratio = region.shape[0] // self.memory.num_blocks
        at = blocks * ratio + tokens % (region.block_size * ratio) // region.block_size
        rows = region.of(self.memory.storage)[at, tokens % region.block_size, :, 0, :8]
        return decode(np.ascontiguousarray(rows).view(np.uint64)[..., 0])

    def _sources(self, region: Region, block: Array, token: Array) -> list[tuple[Region, int]]:
        """The region cut into heads that came from one rank of P each, with that rank, as the row of one token says.

        Which of the ranks that have a row it came from does not matter; guessing it right is what makes the comparison fast.
        """
        (found,) = self._first_words(region, block, token)
        ranks = np.where((found["kind"] == ATTENTION) & (found["rank"] >= 0), found["rank"], 0)
        starts = [0, *(np.flatnonzero(np.diff(ranks)) + 1).tolist(), len(ranks)]
        pieces = []
        for start, end in itertools.pairwise(starts):
            shape = (*region.shape[:2], end - start, *region.shape[3:])
            offset = region.offset + start * region.strides[2]
            pieces.append((replace(region, offset=offset, shape=shape, first=region.first + start), int(ranks[start])))
        return pieces
