"""The checks of one rank: what a load has to bring, against what the whole pool holds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pytest_kvconform.kvspace.kinds import UNWRITTEN
from pytest_kvconform.kvspace.pools.addresses import ATTENTION, STATE, Array
from pytest_kvconform.kvspace.pools.compare import compare_pool
from pytest_kvconform.kvspace.pools.poison import are_nans
from pytest_kvconform.kvspace.pools.regions import Region, token_parts
from pytest_kvconform.kvspace.pools.words import decode
from pytest_kvconform.rigs.bytes.memory import Memory
from pytest_kvconform.rigs.bytes.messages import Check, LoadCheck, Missing, Stale, StepWork

LOOKS = 5  # at a pool that another process writes to; each takes milliseconds


@dataclass(frozen=True)
class Groups:
    """The KV cache groups of an engine, and where in the block tables a token is found."""

    layers: tuple[tuple[str, ...], ...]  # per group
    block_sizes: tuple[int, ...]  # tokens, per group
    states: frozenset[str]  # layers that keep a state
    windows: dict[str, int]  # layer -> tokens of the sliding window of its group; 0: all
    of: dict[str, int]  # layer -> group, in the order of the model
    # layers of which vLLM zeroes new blocks, unless the connector names their group as loaded
    zeroed: frozenset[str] = frozenset()

    def is_state(self, group: int) -> bool:
        return self.layers[group][0] in self.states

    def state_slot(self, table: Array, tokens: int, group: int) -> int:
        """The block that holds the state after `tokens` tokens; 0: none.

        Without prefix caching a request has one such block. Otherwise (mamba_cache_mode "align",
        v1/worker/mamba_utils.py) a state stays in the block of its last token. The next step continues from
        there, in the next block if that one is full.
        """
        return (
            int(table[min((max(tokens, 1) - 1) // self.block_sizes[group], len(table) - 1)])
            if len(table)
            else 0
        )


@dataclass(frozen=True)
class Unwritten:
    """Bytes that were due at the check of a request and had not been written."""

    # bool [byte] of the storage, eight to a byte. Always whole words, although some
    # bytes may be right by accident.
    where: Array
    want: Array  # uint8, what was due there
    held: dict[str, Array]  # as for `compare_pool`
    due: dict[str, Array]


class PoolChecker:
    """Compares one rank's pool with its shadow, and keeps the checks."""

    def __init__(self, memory: Memory, groups: Groups, store: bool = False):
        self.memory, self.groups, self.store = memory, groups, store
        self.regions = [region for of_layer in memory.regions.values() for region in of_layer]
        self.checks: list[Check] = []
        self.unwritten: dict[str, Unwritten] = {}  # request -> bytes that may come later
        # blocks whose load the connector reported as failed, until a check names them
        self.failed: set[int] = set()

    def check_loads(self, work: StepWork) -> None:
        """Compare the pool with its shadow when loads are reported as complete.

        The step that reads the loaded KV has not run yet.
        """
        self.memory.fetch()
        for load in work.load_checks:
            started = time.perf_counter()
            self.memory.accept(work.loading)
            rows, size, due, missing = self._expect(load)
            first = {group: table[table != 0] for group, table in enumerate(load.tables)}
            check = self._compare(
                work.groups, first, due, np.setdiff1d(work.loading, load.loaded), load.request
            )
            seconds = time.perf_counter() - started
            loaded = replace(
                check, request=load.request, local=load.local, computed=load.computed, seconds=seconds
            )
            stale = tuple(self._stale(load, work))
            self.checks.append(
                replace(loaded, rows_due=rows, bytes_due=size, missing=tuple(missing), stale=stale)
            )

    def audit(self, groups: Array, loading: Array) -> Check:
        """Compare the pool with its shadow now.

        `groups`: per block the group whose content it has; `loading`: blocks that loads may write.
        """
        started = time.perf_counter()
        self.memory.fetch()
        self.memory.accept(loading)
        late = self._second_look()
        return replace(
            self._compare(groups, {}, None, loading), late=late, seconds=time.perf_counter() - started
        )

    def pop_checks(self, request: str) -> list[Check]:
        """The checks of a request's loads, once; "": of all requests."""
        mine = [check for check in self.checks if request in ("", check.request)]
        self.checks = [check for check in self.checks if request not in ("", check.request)]
        return mine

    def _compare(
        self,
        groups: Array,
        first: dict[int, Array],
        due: dict[str, Array] | None,
        loading: Array,
        request: str = "",
    ) -> Check:
        """Compare the whole storage with its shadow.

        A difference is reported once: then the shadow takes over what was found.

        `loading`: blocks that other loads may be writing at this very moment, from another process if P
        pushes.
        """
        memory = self.memory
        held = memory.held(self.groups.of, groups, first)
        for _ in range(LOOKS):
            pool = compare_pool(
                memory.storage,
                memory.shadow,
                self.regions,
                held,
                due=due,
                engine=memory.engine,
                spans=memory.spans,
            )
            if not pool.wrong:
                break
            memory.fetch(loading)
            if memory.still_as_accepted(loading):  # no load was writing, so the comparison holds
                break
            memory.accept(loading)
        if due is not None and memory.used is None and pool.words.keys() == {UNWRITTEN}:
            where = _whole_words(memory.storage != memory.shadow)
            self.unwritten[request] = Unwritten(np.packbits(where), memory.shadow[where], held, due)
        if pool.wrong or pool.rows:
            memory.accept_all()
        return Check(rank=memory.rank, pool=pool)

    def _second_look(self) -> tuple[str, ...]:
        """Requests that lacked words at their check and have them all by now.

        The shadow takes these words over.
        """
        memory, late = self.memory, []
        for request, late_bytes in self.unwritten.items():
            where = np.unpackbits(late_bytes.where, count=len(memory.storage)).view(bool)
            if np.array_equal(memory.storage[where], memory.shadow[where]):
                continue  # nothing was written since
            should = memory.shadow.copy()
            should[where] = late_bytes.want
            if not compare_pool(
                memory.storage, should, self.regions, late_bytes.held, due=late_bytes.due, ignore=~where
            ).wrong:
                memory.shadow[where] = memory.storage[where]
                late.append(request)
        self.unwritten.clear()
        return tuple(late)

    def _expect(self, load: LoadCheck) -> tuple[int, int, dict[str, Array], list[Missing]]:
        """Put what is due into the shadow.

        Returns rows and bytes that are due, their blocks as the layers' regions count them, and what is
        missing.
        """
        memory, groups, rows, size = self.memory, self.groups, 0, 0
        due: dict[str, Array] = {}
        missing: dict[int, tuple[int, tuple[int, ...]]] = {}  # group -> window, tokens
        spans: dict[tuple[int, int], _Span] = {}  # (group, window): the same for all layers
        blocks: dict[tuple[int, int], Array] = {}  # likewise
        attention: list[tuple[str, _Span]] = []
        for name, group in groups.of.items() if load.computed > load.local else ():
            if name in groups.states:
                slot = groups.state_slot(load.tables[group], load.computed, group)
                if not slot:
                    missing[group] = 0, (load.computed,)
                    continue
                for region in memory.regions[name]:
                    engine = self._writer_of_state(region, slot, load.either)
                    memory.write_state(
                        (memory.shadow,), region, slot, int(load.owners[-1]), load.computed, engine
                    )
                    rows, size = rows + region.shape[1], size + region.shape[1] * region.width
                due[name] = np.array([slot])
                continue
            key = group, groups.windows[name]
            if key not in spans:
                spans[key] = _span(load, *key, groups.block_sizes[group])
            if spans[key].gone:
                missing[group] = key[1], spans[key].gone
            if len(spans[key].tokens):
                attention.append((name, spans[key]))
        for (name, span), ranks in zip(attention, self._ranks(attention), strict=True):
            (region,) = memory.regions[name]
            self._expect_tokens(region, span, ranks, load.either)
            due[name] = blocks.setdefault((id(span), memory.ratio(name)), memory.expand(name, span.due))
            rows, size = (
                rows + len(span.tokens) * math.prod(region.shape[2:4]),
                size + len(span.tokens) * math.prod(region.shape[2:]),
            )
        nulls = [
            Missing(group, groups.layers[group], window, groups.block_sizes[group], tokens)
            for group, (window, tokens) in sorted(missing.items())
        ]
        return rows, size, due, nulls

    def _expect_tokens(self, region: Region, span: _Span, ranks: Array, either: bool) -> None:
        """Put the rows of one layer into the shadow, cut into heads that came from one rank of P each."""
        if self.store or either:
            found = decode(self._first_words(region, span.blocks, span.tokens)[:, 0])
            # D may get back what it has itself saved to a store, or generated. D's poison is not that.
            of_d = (found["kind"] == ATTENTION) & (found["engine"] == 1)
            parts = [(0, ~of_d), (1, of_d)]
        else:
            parts = [(0, np.ones(len(span.tokens), dtype=bool))]
        starts = [0, *(np.flatnonzero(np.diff(ranks)) + 1).tolist(), len(ranks)]
        for start, end in itertools.pairwise(starts):
            piece = region
            if len(starts) > 2:
                shape, offset = (
                    (*region.shape[:2], end - start, *region.shape[3:]),
                    region.offset + start * region.strides[2],
                )
                piece = replace(region, offset=offset, shape=shape, first=region.first + start)
            for engine, some in parts:
                if some.any():
                    shares = span.shares[some]
                    self.memory.write_tokens(
                        (self.memory.shadow,),
                        piece,
                        span.blocks[some],
                        span.tokens[some],
                        shares,
                        engine,
                        int(ranks[start]),
                    )

    def _stale(self, load: LoadCheck, work: StepWork) -> Iterator[Stale]:
        """Rows of D's new blocks around a load that still hold poison, where vLLM would have zeroed them.

        Tokens that this step computes are not counted: they are written before attention reads them.
        """
        if load.computed <= load.local:
            return
        end = next((part.end for part in work.parts if part.request == load.request), load.computed)
        new = np.setdiff1d(load.loaded, sorted(self.failed))
        for name in self.groups.zeroed & self.groups.of.keys():
            group, window = self.groups.of[name], self.groups.windows[name]
            size, first = self.groups.block_sizes[group], load.local
            if window:
                first = max(first, load.computed - window + 1)
            at = np.flatnonzero(np.isin(load.tables[group], new))
            tokens = (at[:, None] * size + np.arange(size)).ravel()
            tokens = tokens[(tokens < first) | (tokens >= end)]
            rows = self._rows(self.memory.regions[name][0], load.tables[group][tokens // size], tokens)
            words = np.ascontiguousarray(rows[..., : rows.shape[-1] // 8 * 8]).view(np.uint64)
            if len(left := tokens[are_nans(words).any(axis=(1, 2, 3))]):
                yield Stale(name, tuple(left.tolist()), (first, load.computed - 1))

    def _writer_of_state(self, region: Region, slot: int, either: bool) -> int:
        """The engine that must have computed a state: P, or D where either may have done it."""
        if not (self.store or either):
            return 0
        word = np.zeros((1, 8), dtype=np.uint8)
        word[0, : min(8, region.width)] = region.of(self.memory.storage)[slot, 0, :8]
        found = decode(word.view(np.uint64)[0], min(8, region.width))[0]
        return int(found["kind"] == STATE and found["engine"] == 1)

    def _first_words(self, region: Region, blocks: Array, tokens: Array) -> Array:
        """The first word of every head's first plane: uint64 [token, head]."""
        rows = self._rows(region, blocks, tokens)[:, :, 0, :8]
        return np.ascontiguousarray(rows).view(np.uint64)[..., 0]

    def _rows(self, region: Region, blocks: Array, tokens: Array) -> Array:
        """The rows of tokens in their blocks, as the storage has them: uint8 [token, head, plane, byte]."""
        ratio = region.shape[0] // self.memory.num_blocks
        at = blocks * ratio + tokens % (region.block_size * ratio) // region.block_size
        return region.of(self.memory.storage)[at, tokens % region.block_size]

    def _ranks(self, layers: list[tuple[str, _Span]]) -> list[Array]:
        """For each layer which rank of P every head came from, read from the row of one token: int [head].

        If several ranks have a row, any of them is right. A right guess makes the comparison fast.
        """
        words = [
            self._first_words(self.memory.regions[name][0], span.blocks[:1], span.tokens[:1])[0]
            for name, span in layers
        ]
        found = decode(np.concatenate([np.zeros(0, dtype=np.uint64), *words]))
        ranks = np.where((found["kind"] == ATTENTION) & (found["rank"] >= 0), found["rank"], 0)
        return np.split(ranks, np.cumsum([len(some) for some in words])[:-1]) if words else []


def _whole_words(mask: Array) -> Array:
    """A mask of bytes, bool [byte], grown to all bytes of the words that it touches."""
    padded = np.append(mask, np.zeros(-len(mask) % 8, dtype=bool))
    return np.repeat(padded.reshape(-1, 8).any(axis=1), 8)[: len(mask)]


@dataclass(frozen=True)
class _Span:
    """What is due for layers of one group and window."""

    tokens: Array  # positions
    blocks: Array  # of each token
    shares: Array  # of each token, see `token_parts`
    due: Array  # blocks, each once, in the order of the block table
    gone: tuple[int, ...]  # positions of which the block is the null block


def _span(load: LoadCheck, group: int, window: int, size: int) -> _Span:
    first = max(load.local, load.computed - window + 1 if window else 0)
    # A block in which the window begins is due from its own first token: D puts it into its prefix cache, and
    # the window of a later request that hits it may begin earlier.
    tokens = np.arange(max(load.local, first // size * size if load.cached else first), load.computed)
    blocks = load.tables[group][tokens // size]
    gone = tuple(tokens[(blocks == 0) & (tokens >= first)].tolist())
    tokens, blocks = tokens[blocks != 0], blocks[blocks != 0]
    return _Span(
        tokens,
        blocks,
        token_parts(tokens, load.owners[tokens]),
        np.array(list(dict.fromkeys(blocks.tolist()))),
        gone,
    )
