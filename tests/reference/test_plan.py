"""Plans against a copy that is made cell by cell, over all geometries.

A plan reads the same bytes and no others, in the fewest runs, from the fewest ranks.
"""

from __future__ import annotations

import itertools
import types
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings

from reference_connector import plan
from reference_connector.boxes import Box
from tests.reference.worlds import Engine, Setup, World, naive, offsets, worlds

CHECKED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
SEARCHED = settings(CHECKED, max_examples=1500, phases=[Phase.generate], derandomize=True, database=None)


def check(world: World, planner: types.ModuleType = plan) -> None:
    """Every rank of D reads what it should, every byte once, and its other bytes stay."""
    p, d, untouched = (
        Engine(world.p, world.seed),
        Engine(world.d, world.seed + 1),
        Engine(world.d, world.seed + 1),
    )
    for rank in range(world.d.tp):
        due, whole = Engine(world.d, world.seed + 1), Engine(world.d, world.seed + 1)
        naive(
            due,
            rank,
            p,
            [(start, stop) for start, stop, _ in map(blocks_of, *per_group(world))],
            world.local,
            world.remote,
        )
        naive(
            whole,
            rank,
            p,
            [(start, end) for start, _, end in map(blocks_of, *per_group(world))],
            world.local,
            world.remote,
        )
        pairing = planner.pair(d.boxes[rank], p.boxes, rank, world.d.tp)
        found = planner.runs(pairing, world.spans, world.local, world.remote)
        assert tuple(found) == pairing.ranks
        read = np.zeros(len(d.memory[rank]), np.int64)
        for number, runs in found.items():
            places = (
                offsets(runs.local, runs.length, d.memory[rank]),
                offsets(runs.remote, runs.length, p.memory[number]),
            )
            for local, remote, length in zip(*places, runs.length, strict=True):
                read[local : local + length] += 1
                d.memory[rank][local : local + length] = p.memory[number][remote : remote + length]
        assert read.max() <= 1, "a byte is read twice"
        more = (d.memory[rank] != due.memory[rank]) & (d.memory[rank] == whole.memory[rank])
        assert ((d.memory[rank] == due.memory[rank]) | more).all(), "D does not hold what it should"
        assert more.sum() <= plan.WORTH * sum(len(runs.length) for runs in found.values())
        assert not ((due.memory[rank] != untouched.memory[rank]) & (read == 0)).any()
        assert_fewest_ranks(d.boxes[rank], p.boxes, pairing.ranks)
        for runs in found.values():
            assert_fewest_runs(runs)


def per_group(world: World) -> tuple[list[Any], ...]:
    """By group of D: its span, and block size and first token of both tables."""
    at = {group[0].name: index for index, group in enumerate(world.p.groups)}
    first = [world.remote[at[group[0].name]].first for group in world.d.groups]
    state = [group[0].state for group in world.d.groups]
    return (
        world.spans,
        state,
        [world.d] * len(state),
        [world.p] * len(state),
        [table.first for table in world.local],
        first,
    )


def blocks_of(
    span: tuple[int, int], state: bool, d: Setup, p: Setup, mine: int, theirs: int
) -> tuple[int, int, int]:
    """(start, stop, end) of what is read for a span: from the start of D's first block to `stop` or `end`.

    It starts later if P's table does.
    """
    start, stop = span
    if state or start == stop:
        return start, stop, stop
    while start > theirs and (start - mine) % d.block:
        start -= 1
    end = stop
    while (end - mine) % (d.block // d.pieces) and (end - theirs) % (p.block // p.pieces):
        end += 1
    return start, stop, end


def assert_fewest_runs(runs: plan.Runs) -> None:
    """No two of them could be one."""
    ends = {
        (local, remote)
        for local, remote in zip(runs.local + runs.length, runs.remote + runs.length, strict=True)
    }
    assert not ends & set(zip(runs.local, runs.remote, strict=True)), (
        "two runs that follow each other on both sides"
    )


def assert_fewest_ranks(local: list[Box], remote: list[list[Box]], ranks: tuple[int, ...]) -> None:
    """No smaller set of P's ranks has all heads and channels."""

    def cells(boxes: list[Box]) -> set[tuple[object, ...]]:
        return {
            (b.layer, b.part, at)
            for b in boxes
            if b.layer.endswith("0")
            for at in range(b.axes[0].start, b.axes[0].stop)
        }

    needed, has = cells(local), [cells(boxes) for boxes in remote]
    assert not needed - set().union(*(has[rank] for rank in ranks))
    for fewer in itertools.combinations(range(len(remote)), len(ranks) - 1):
        assert needed - set().union(*(has[rank] for rank in fewer)), "fewer ranks would do"


@CHECKED
@given(worlds())
def test_reads_what_a_copy_cell_by_cell_reads(world: World) -> None:
    check(world)
