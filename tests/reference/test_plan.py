"""Plans against a copy that is made cell by cell, over all geometries: the same bytes and no others, the fewest runs, the fewest ranks."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from reference_connector import plan
from reference_connector.boxes import Axis, Box
from tests.reference.worlds import LAYOUTS, Engine, Kind, Setup, World, naive, worlds

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
        for runs in found.values():
            last = offsets(runs.local, runs.length, d.memory[rank]) + runs.length - 1
            assert not more[last].any(), "a run ends with what nobody needs"
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
    """(start, stop, end) of what is read for a span: from where D's first block begins, if P has that, to `stop` or up to `end`."""
    start, stop = span
    if state or start == stop:
        return start, stop, stop
    while start > theirs and (start - mine) % d.block:
        start -= 1
    end = stop
    while (end - mine) % (d.block // d.pieces) and (end - theirs) % (p.block // p.pieces):
        end += 1
    return start, stop, end


def offsets(addresses: np.ndarray, lengths: np.ndarray, memory: np.ndarray) -> np.ndarray:
    found = addresses - memory.__array_interface__["data"][0]
    assert (lengths > 0).all() and (found >= 0).all() and (found + lengths <= len(memory)).all(), (
        "outside of the memory"
    )
    return found


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


MISTAKES = {  # a piece of plan.py -> what a mistake would make of it
    "if local == remote == width:": "if local == width:",
    " & (remote[1:] == remote[:-1] + length[:-1])": "",
    "np.union1d(cuts[1:-1], others[1:-1])": "cuts[1:-1]",
    "local += (start - a.start) * a.stride": "local += 0",
    "remote += (start - b.start) * b.stride": "remote += 0",
    "min(a.stop, b.stop) - start": "a.stop - a.start",
    "np.divmod(cuts[:-1] - table.first // box.unit,": "np.divmod(cuts[:-1],",
    "(ids * box.pieces + piece)": "(ids + piece)",
    "steps[last] == steps[first]": "steps[last][0] == steps[first][0]",
    "np.repeat(remote, counts) + within * match.theirs.token_stride": "np.repeat(remote, counts) + within * match.mine.token_stride",
    "remote[match.theirs.group]": "remote[match.mine.group]",
    "lengths = counts * sizes[0][1]": "lengths = counts * width",
    "-= strip.over": "-= 0",
    "strip.end + strip.offsets(1)": "strip.end",
    "those[runs.local[those] + runs.length[those] == ends]": "those",
    "start - (start - table.first // box.unit) % size": "start",
    "min(start, max(start - before, theirs.first // unit))": "start",
    "max(start - before, theirs.first // unit)": "start - before",
    "end = min(cuts[-1], others[-1])": "end = cuts[-1]",
    "local[order], remote[order], length[order]": "local[order], remote, length",
    "found[ranges][number] = box": "found[(number,), *ranges][number] = box",
    "abs(number - nearest)": "-abs(number - nearest)",
    "np.add.reduceat(length, firsts)": "length[firsts]",
    "if total <= EXACT else (local": "if False else (local",
}


@pytest.mark.parametrize("right", MISTAKES)
def test_notices_a_mistake(right: str) -> None:
    source = inspect.getsource(plan)
    assert source.count(right) == 1, f"plan.py no longer says {right!r} in one place"
    planner = types.ModuleType("mistaken_plan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, planner.__name__, planner)  # where dataclasses look for their module
        exec(source.replace(right, MISTAKES[right]), vars(planner))

        @SEARCHED
        @given(worlds())
        def search(world: World) -> None:
            check(world, planner)

        with pytest.raises((AssertionError, planner.Unplannable, ValueError, IndexError, KeyError)):
            search()


# ---- how many runs
# ------------------------------------------------------------------------------------------------------------


GQA, MLA = (
    Kind("gqa", ("a.0", "a.1", "a.2"), 4, 8),
    Kind("mla", ("m.0", "m.1", "m.2"), 1, 12, replicated=True),
)
STATE = Kind("state", ("s.0", "s.1"), 4, 16, state=True)
SETUP = Setup(tp=1, groups=((GQA,),), layout="LBHNC", block=4, pieces=1, num_blocks=20, conv="DS")


def count(p: Setup, d: Setup, span: tuple[int, int], local: list[int], remote: list[int]) -> dict[int, int]:
    """Runs by rank of P, for rank 0 of D."""
    pairing = plan.pair(Engine(d, 0).boxes[0], Engine(p, 0).boxes, 0, d.tp)
    found = plan.runs(pairing, [span], [plan.Table(local)], [plan.Table(remote)])
    return {rank: len(runs.length) for rank, runs in found.items()}


UP, DOWN, MIXED = [4, 5, 6], [6, 5, 4], [9, 4, 7]


@pytest.mark.parametrize("exact", [plan.EXACT, 0], ids=["small", "large"])
def test_widens_runs(exact: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers, four heads, three blocks of four tokens. Large plans, which are not searched for neighbours, are as good here."""
    monkeypatch.setattr(plan, "EXACT", exact)
    outer = replace(SETUP, layout="BLHNC")
    tokens = replace(SETUP, layout="LBNHC")
    assert count(SETUP, SETUP, (0, 12), UP, UP) == {0: 3}, "a layer is a run"
    assert count(SETUP, SETUP, (0, 12), DOWN, DOWN) == {0: 3}, "also when blocks stand in descending order"
    assert count(SETUP, SETUP, (0, 12), UP, DOWN) == {0: 3 * 3}, "a block of a layer is a run"
    assert count(outer, outer, (0, 12), UP, UP) == {0: 1}
    assert count(outer, outer, (0, 12), MIXED, UP) == {0: 3}, "all layers of a block are a run"
    assert count(SETUP, SETUP, (0, 11), MIXED, UP) == {0: 3 * 3}, (
        "a block that is not full is read as a whole"
    )
    monkeypatch.setattr(
        plan, "WORTH", 10
    )  # bytes: the token that is too many has 32 in each layer, and spares three runs
    assert count(SETUP, SETUP, (0, 11), MIXED, UP) == {0: 3 * (2 + 4)}, (
        "unless that is too much: then every head of it is a run"
    )
    assert count(tokens, tokens, (1, 11), UP, UP) == {0: 3}, "unless tokens are outside of heads"
    assert count(SETUP, tokens, (0, 12), MIXED, UP) == {0: 3 * 12 * 4}, "every cell is a run"
    assert count(replace(SETUP, tp=2), SETUP, (0, 12), UP, UP) == {0: 3 * 3, 1: 3 * 3}, "heads of a block"
    assert count(SETUP, replace(SETUP, tp=2), (0, 12), UP, UP) == {0: 3 * 3}
    assert count(replace(SETUP, block=12), SETUP, (0, 12), MIXED, [5]) == {0: 3 * 3 * 4}, (
        "heads of blocks of another size"
    )


def test_leaves_the_end_of_a_run_unread_and_makes_no_second_one_of_it() -> None:
    """Two groups of three layers with four heads of 8 bytes in blocks of four tokens."""
    outer = replace(
        SETUP, groups=((GQA,), (replace(GQA, name="window", layers=("w.0", "w.1", "w.2")),)), layout="BLHNC"
    )
    block, token = 3 * 4 * 4 * 8, 8
    pairing = plan.pair(Engine(outer, 0).boxes[0], Engine(outer, 0).boxes)
    for second, lengths in (([7, 8, 9], [6 * block - token]), ([8, 9, 10], [3 * block - token] * 2)):
        tables = [plan.Table(UP), plan.Table(second)]
        assert plan.runs(pairing, [(0, 11)] * 2, tables, tables)[0].length.tolist() == lengths
    for local, remote, lengths in ((DOWN, DOWN, [3 * block]), (MIXED, UP, [block - token, block, block])):
        tables = [[plan.Table(local), plan.Table([])], [plan.Table(remote), plan.Table([])]]
        assert sorted(plan.runs(pairing, [(0, 11), (0, 0)], *tables)[0].length) == lengths


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_in_one_run_a_layer(layout: str) -> None:
    setup = replace(SETUP, groups=((STATE,),), layout=layout)
    assert count(setup, setup, (0, 1), [7], [3]) == {0: 2}
    assert count(setup, replace(setup, tp=2), (0, 1), [7], [3]) == {0: 2 * 4}, (
        "Q, K, V and ssm are sharded each on its own"
    )


def test_reads_replicated_kv_from_one_rank_and_spreads_it() -> None:
    both = replace(SETUP, groups=((MLA, GQA),))
    assert set(count(replace(both, tp=2), both, (0, 12), UP, UP)) == {0, 1}
    p, d = (
        Engine(replace(SETUP, groups=((MLA,),), tp=8), 0),
        Engine(replace(SETUP, groups=((MLA,),), tp=4), 0),
    )
    assert [plan.pair(d.boxes[rank], p.boxes, rank, 4).ranks for rank in range(4)] == [(0,), (2,), (4,), (6,)]


def test_tiles_are_read_whole_or_cut() -> None:
    """A block of [K transposed | V], one head, 2 bytes an element, a head of 3: read whole if blocks are alike, else K by element."""

    def boxes(memory: np.ndarray, tokens: int) -> list[Box]:
        at = memory.__array_interface__["data"][0]
        head, inner, page = Axis("head", 0, 1, 1, 0), Axis("element", 0, 3, 3, tokens * 2), tokens * 12
        common = ("a", "kv", 0)
        made = [
            ("tile", at, tokens, 0, (head,), page),
            ("k", at, 1, 2, (head, inner), 2),
            ("v", at + tokens * 6, 1, 6, (head,), 6),
        ]
        return [
            Box(
                common[0],
                part,
                "x",
                0,
                address,
                len(memory) // page,
                page,
                1,
                tokens,
                unit,
                stride,
                axes,
                width,
            )
            for part, address, unit, stride, axes, width in made
        ]

    rng = np.random.default_rng(0)
    for here, there, span in itertools.product((4, 8), (4, 8), ((0, 16), (8, 13), (0, 3))):
        d, p = rng.integers(0, 256, here * 12 * 20, np.uint8), rng.integers(0, 256, there * 12 * 20, np.uint8)
        before, tables = d.copy(), ([3, 9, 4, 7], [5, 2, 8, 1])
        runs = plan.runs(
            plan.pair(boxes(d, here), [boxes(p, there)]),
            [span],
            [plan.Table(tables[0])],
            [plan.Table(tables[1])],
        )[0]
        for local, remote, length in zip(runs.local, runs.remote, runs.length, strict=True):
            (
                offsets(np.array([local]), np.array([length]), d),
                offsets(np.array([remote]), np.array([length]), p),
            )
            ctypes.memmove(int(local), int(remote), int(length))
        k = [m.reshape(20, n * 12)[:, : n * 6].reshape(20, 3, n, 2) for m, n in ((d, here), (p, there))]
        v = [m.reshape(20, n * 12)[:, n * 6 :].reshape(20, n, 6) for m, n in ((d, here), (p, there))]
        for t in range(*span):
            mine, theirs = (tables[0][t // here], t % here), (tables[1][t // there], t % there)
            assert (k[0][mine[0], :, mine[1]] == k[1][theirs[0], :, theirs[1]]).all()
            assert (v[0][mine] == v[1][theirs]).all()
        if here == there:
            assert len(runs.length) == -(-span[1] // here) - span[0] // here
        else:
            assert runs.nbytes == (span[1] - span[0]) * 12
        others = np.setdiff1d(np.arange(20), [tables[0][t // here] for t in range(*span)])
        assert (d.reshape(20, -1)[others] == before.reshape(20, -1)[others]).all()


# ---- what cannot be planned
# ---------------------------------------------------------------------------------------------------


def change(**fields: object) -> Callable[[list[Box]], list[Box]]:
    return lambda boxes: [boxes[0], *(_changed(box, fields) for box in boxes[1:])]


def _changed(box: Box, fields: dict[str, object]) -> Box:
    return Box(**{name: fields.get(name, getattr(box, name)) for name in Box.__struct_fields__})


@pytest.mark.parametrize(
    ("of_p", "sentence"),
    [
        (lambda boxes: boxes[:1], "P has no kv of layer a.1, which D has."),
        (change(element="float16"), "kv of layer a.1: D has elements bytes, and rank 0 of P has float16."),
        (change(width=16), "kv of layer a.1: D has bytes a cell 8, and rank 0 of P has 16."),
        (change(unit=3, tokens=3), "kv of layer a.1: D has tokens a cell 1, and rank 0 of P has 3."),
        (change(unit=2), "kv of layer a.1: D has tokens a cell 1, and rank 0 of P has 2."),
        (
            change(axes=(Axis("head", 0, 8, 8, 32),)),
            "kv of layer a.1: D has axes [('head', 4)], and rank 0 of P has [('head', 8)].",
        ),
        (
            change(axes=(Axis("head", 1, 3, 4, 32),)),
            "kv of layer a.1: D needs head 0 to 4, and P's ranks have head 1 to 3.",
        ),
    ],
)
def test_says_why_two_engines_do_not_pair(of_p: Callable[[list[Box]], list[Box]], sentence: str) -> None:
    p, d = Engine(SETUP, 0), Engine(SETUP, 0)
    with pytest.raises(plan.Unplannable) as raised:
        plan.pair(d.boxes[0], [of_p(p.boxes[0])])
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("span", "local", "remote", "sentence"),
    [
        (
            (0, 9),
            ([4, 5], 0),
            ([4, 5, 6], 0),
            "Group 0 of D: the table covers tokens 0 to 8, and tokens 0 to 12 are wanted.",
        ),
        (
            (3, 8),
            ([4, 5], 0),
            ([5], 4),
            "Group 0 of P: the table covers tokens 4 to 8, and tokens 3 to 8 are wanted.",
        ),
        (
            (0, 8),
            ([4, 5], 0),
            ([], 0),
            "Group 0 of P: the table covers tokens 0 to 0, and tokens 0 to 8 are wanted.",
        ),
        (
            (0, 8),
            ([4, 0], 0),
            ([4, 5], 0),
            "Group 0 of D: tokens are wanted in blocks 0 to 4, and only blocks 1 to 19 hold any.",
        ),
        (
            (0, 8),
            ([4, 5], 0),
            ([4, 20], 0),
            "Group 0 of P: tokens are wanted in blocks 4 to 20, and only blocks 1 to 19 hold any.",
        ),
    ],
)
def test_says_why_a_request_cannot_be_read(
    span: tuple[int, int], local: tuple[list[int], int], remote: tuple[list[int], int], sentence: str
) -> None:
    pairing = plan.pair(Engine(SETUP, 0).boxes[0], Engine(SETUP, 0).boxes)
    with pytest.raises(plan.Unplannable) as raised:
        plan.runs(pairing, [span], [plan.Table(*local)], [plan.Table(*remote)])
    assert str(raised.value) == sentence


def test_says_that_a_table_is_missing() -> None:
    pairing = plan.pair(Engine(SETUP, 0).boxes[0], Engine(SETUP, 0).boxes)
    with pytest.raises(
        plan.Unplannable, match=r"^P handed over tables of 0 groups, and that of group 0 is needed\.$"
    ):
        plan.runs(pairing, [(0, 8)], [plan.Table([4, 5])], [])


def test_a_block_that_is_entered_is_read_from_its_start() -> None:
    """A window begins within a block, and vLLM puts that block into the prefix cache: a later request may look at its first tokens."""
    pairing = plan.pair(Engine(SETUP, 0).boxes[0], Engine(SETUP, 0).boxes)
    cells = 3 * 4 * 8
    for first, tokens in (
        (0, 8),
        (4, 8),
        (6, 6),
        (7, 5),
    ):  # where P's table begins: not before 4 where D's block does
        found = plan.runs(pairing, [(7, 12)], [plan.Table([3, 4, 5])], [plan.Table([9, 8, 7], first)])
        assert found[0].nbytes == tokens * cells


def test_looks_past_blocks_outside_of_the_span() -> None:
    """A window's table may begin with null blocks, and a table of nothing may hold anything."""
    pairing = plan.pair(Engine(SETUP, 0).boxes[0], Engine(SETUP, 0).boxes)
    found = plan.runs(pairing, [(5, 12)], [plan.Table([0, 4, 5, 99])], [plan.Table([0, 0, 9, 8], -4)])
    assert found[0].nbytes == 8 * 3 * 4 * 8
    assert plan.runs(pairing, [(0, 0)], [plan.Table([])], [plan.Table([0])])[0].nbytes == 0
