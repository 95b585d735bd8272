"""How many runs a plan has, what it reads besides its span, and the errors of pair and runs."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from reference_connector import plan
from reference_connector.boxes import Axis, Box
from tests.reference.worlds import LAYOUTS, Engine, Kind, Setup, offsets

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
    """Three layers, four heads, three blocks of four tokens. Large plans are not searched for neighbours."""
    monkeypatch.setattr(plan, "EXACT", exact)
    outer = replace(SETUP, layout="BLHNC")
    tokens = replace(SETUP, layout="LBNHC")
    assert count(SETUP, SETUP, (0, 12), UP, UP) == {0: 3}, "a layer is a run"
    assert count(SETUP, SETUP, (0, 12), DOWN, DOWN) == {0: 3}, "also when block ids descend"
    assert count(SETUP, SETUP, (0, 12), UP, DOWN) == {0: 3 * 3}, "a block of a layer is a run"
    assert count(outer, outer, (0, 12), UP, UP) == {0: 1}
    assert count(outer, outer, (0, 12), MIXED, UP) == {0: 3}, "all layers of a block are a run"
    assert count(SETUP, SETUP, (0, 11), MIXED, UP) == {0: 3 * 3}, (
        "a block that is not full is read as a whole"
    )
    # bytes: the extra token has 32 in each layer, and saves three runs
    monkeypatch.setattr(plan, "WORTH", 10)
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


def test_the_rest_of_the_last_block_splits_no_run() -> None:
    """Two groups of three layers with four heads of 8 bytes in blocks of four tokens."""
    outer = replace(
        SETUP, groups=((GQA,), (replace(GQA, name="window", layers=("w.0", "w.1", "w.2")),)), layout="BLHNC"
    )
    block = 3 * 4 * 4 * 8
    pairing = plan.pair(Engine(outer, 0).boxes[0], Engine(outer, 0).boxes)
    for second, lengths in (([7, 8, 9], [6 * block]), ([8, 9, 10], [3 * block] * 2)):
        tables = [plan.Table(UP), plan.Table(second)]
        assert plan.runs(pairing, [(0, 11)] * 2, tables, tables)[0].length.tolist() == lengths


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_is_one_run_for_each_layer(layout: str) -> None:
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
    """A block of [K transposed | V], one head of 3: read whole if blocks are alike, else K by element."""

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


def test_a_block_that_is_entered_is_read_from_its_start() -> None:
    """A window begins within a block. vLLM caches that block, and a later request may use its start."""
    pairing = plan.pair(Engine(SETUP, 0).boxes[0], Engine(SETUP, 0).boxes)
    cells = 3 * 4 * 8
    # where P's table begins: not before 4 where D's block does
    for first, tokens in (
        (0, 8),
        (4, 8),
        (6, 6),
        (7, 5),
    ):
        found = plan.runs(pairing, [(7, 12)], [plan.Table([3, 4, 5])], [plan.Table([9, 8, 7], first)])
        assert found[0].nbytes == tokens * cells


def test_looks_past_blocks_outside_of_the_span() -> None:
    """A window's table may begin with null blocks, and a table of nothing may hold anything."""
    pairing = plan.pair(Engine(SETUP, 0).boxes[0], Engine(SETUP, 0).boxes)
    found = plan.runs(pairing, [(5, 12)], [plan.Table([0, 4, 5, 99])], [plan.Table([0, 0, 9, 8], -4)])
    assert found[0].nbytes == 8 * 3 * 4 * 8
    assert plan.runs(pairing, [(0, 0)], [plan.Table([])], [plan.Table([0])])[0].nbytes == 0


# ---- what cannot be planned


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
def test_the_error_of_pair_tells_what_differs(of_p: Callable[[list[Box]], list[Box]], sentence: str) -> None:
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
            "Group 0 of D: the table has tokens 0 to 8, and D needs 0 to 12.",
        ),
        (
            (3, 8),
            ([4, 5], 0),
            ([5], 4),
            "Group 0 of P: the table has tokens 4 to 8, and D needs 3 to 8.",
        ),
        (
            (0, 8),
            ([4, 5], 0),
            ([], 0),
            "Group 0 of P: the table has tokens 0 to 0, and D needs 0 to 8.",
        ),
        (
            (0, 8),
            ([4, 0], 0),
            ([4, 5], 0),
            "Group 0 of D: the table has blocks 0 to 4, and the pool has 1 to 19.",
        ),
        (
            (0, 8),
            ([4, 5], 0),
            ([4, 20], 0),
            "Group 0 of P: the table has blocks 4 to 20, and the pool has 1 to 19.",
        ),
    ],
)
def test_the_error_of_runs_tells_what_a_table_lacks(
    span: tuple[int, int], local: tuple[list[int], int], remote: tuple[list[int], int], sentence: str
) -> None:
    pairing = plan.pair(Engine(SETUP, 0).boxes[0], Engine(SETUP, 0).boxes)
    with pytest.raises(plan.Unplannable) as raised:
        plan.runs(pairing, [span], [plan.Table(*local)], [plan.Table(*remote)])
    assert str(raised.value) == sentence


def test_the_error_of_runs_tells_that_a_table_is_missing() -> None:
    pairing = plan.pair(Engine(SETUP, 0).boxes[0], Engine(SETUP, 0).boxes)
    with pytest.raises(plan.Unplannable, match=r"^P handed over 0 tables, and D needs that of group 0\.$"):
        plan.runs(pairing, [(0, 8)], [plan.Table([4, 5])], [])
