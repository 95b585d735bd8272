"""compare_pool: it finds nothing in a correct pool, and gives each changed word its kind."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pytest_kvconform.kvspace.kinds import COLLATERAL, GARBLED, MOVED, SAME, UNWRITTEN, ZEROED
from pytest_kvconform.kvspace.pools.compare import PoolComparison, compare_pool
from pytest_kvconform.kvspace.pools.diagnose import count_pool, diagnose_pool
from pytest_kvconform.kvspace.pools.draw import draw_pool
from pytest_kvconform.kvspace.pools.poison import poison
from pytest_kvconform.kvspace.pools.regions import Region, token_parts, token_rows, write_tokens
from tests.kvspace.pools import Pool, attention, pools

SETTINGS = settings(max_examples=60, deadline=None)


def compared(pool: Pool, **more) -> PoolComparison:
    found = compare_pool(pool.storage, pool.shadow, pool.regions, pool.held, engine=1, **more)
    assert len(draw_pool(found)) <= 20
    assert bool(found.wrong) == bool(diagnose_pool(found)) == bool(draw_pool(found))
    assert (
        sum(found.runs["words"][found.runs["kind"] != SAME]) + len(found.raw) == found.wrong
        or found.truncated
    )
    return found


def loaded(pool: Pool) -> Pool:
    pool.storage[:] = pool.shadow
    return pool


def rows_due(pool: Pool, region: Region) -> list[tuple[int, ...]]:
    """Places (block, slot) or (slot,) of a region in which data is due."""
    blocks = pool.held[region.layer]
    if region.kind == "state":
        return [(blocks[0], channel) for channel in range(region.shape[1])]
    return [
        (blocks[t // region.block_size], t % region.block_size, h, p)
        for t in range(pool.tokens)
        for h in range(region.shape[2])
        for p in range(region.shape[3])
    ]


@SETTINGS
@given(pools())
def test_an_untouched_pool_has_no_difference(pool):
    found = compared(loaded(pool))
    assert not found.wrong and not len(found.runs) and found.worst == SAME
    assert found.compared_bytes == sum(
        int(np.prod(r.shape[1:])) * len(pool.held[r.layer]) for r in pool.regions
    )


@SETTINGS
@given(pools())
def test_a_load_that_did_nothing_leaves_everything_unwritten(pool):
    found = compared(pool)
    assert set(found.words) == {UNWRITTEN}
    assert found.rows[UNWRITTEN] == sum(len(rows_due(pool, region)) for region in pool.regions)
    assert "no byte of" in diagnose_pool(found)


@SETTINGS
@given(pools(), st.data())
def test_one_row_is_classified_whatever_is_done_to_it(pool, data):
    loaded(pool)
    region = data.draw(st.sampled_from(pool.regions))
    places = rows_due(pool, region)
    place = data.draw(st.sampled_from(places))
    view, due = region.of(pool.storage), region.of(pool.shadow)
    what = data.draw(
        st.sampled_from(["zero", "flip", "row of another place", "row of another layer", "foreign"])
    )
    if what == "zero":
        view[place], kind = 0, ZEROED
    elif what == "flip":
        view[place][data.draw(st.integers(0, region.width - 1))] ^= 1 << data.draw(st.integers(0, 7))
        kind = None  # garbled, but for one accident in 32 to 2048
    elif what == "foreign":
        view[place] = np.random.default_rng(4).integers(0, 128, region.width)
        kind = None
    elif what == "row of another place":
        other = data.draw(st.sampled_from(places))
        assume(other != place)
        view[place], kind = due[other], MOVED
    else:
        others = [
            r for r in pool.regions if r is not region and (r.kind, r.width) == (region.kind, region.width)
        ]
        assume(others)
        other = data.draw(st.sampled_from(others))
        view[place], kind = other.of(pool.shadow)[data.draw(st.sampled_from(rows_due(pool, other)))], MOVED
    found = compared(pool)
    assert found.worst in ((kind,) if kind is not None else (GARBLED, MOVED))
    assert sum(found.rows.values()) == 1
    wrong = found.runs[found.runs["kind"] != SAME]
    assert {int(b) for b in wrong["block"]} == {place[0]} and {
        found.regions[i].layer for i in wrong["region"]
    } == {region.layer}
    if kind == MOVED:
        expected, held, words = found.pairs()
        assert (
            words.sum() <= region.lanes
            and (expected != held).all()
            and (expected["layer"] == region.number).all()
        )


@SETTINGS
@given(pools(), st.data())
def test_a_byte_changed_where_nothing_was_due_is_collateral(pool, data):
    loaded(pool)
    covered = np.zeros(len(pool.storage), dtype=bool)
    for region in pool.regions:
        for place in rows_due(pool, region):
            region.of(covered)[place] = True
    free = np.flatnonzero(~covered)
    assume(len(free))
    at = int(data.draw(st.sampled_from(free.tolist())))
    pool.storage[at] ^= data.draw(st.integers(1, 255))
    found = compared(pool)
    assert found.words == {COLLATERAL: 1}
    # one such word in 64 is like one of P's, see words.py
    likely, else_ = "something wrote where nothing was due: ", "a load wrote outside its own blocks: "
    assert diagnose_pool(found).startswith((likely, else_))
    mask = np.zeros(len(pool.storage), dtype=bool)
    mask[at] = True
    assert not compared(pool, ignore=mask).wrong


@SETTINGS
@given(pools(with_state=False), st.data())
def test_data_in_an_unowned_block_is_described(pool, data):
    loaded(pool)
    region = data.draw(st.sampled_from(pool.regions))
    held = {block for blocks in pool.held.values() for block in blocks}
    block = next(b for b in range(region.shape[0]) if b not in held)
    region.of(pool.storage)[block, 0] = token_rows(region, token_parts([5], [7]), 0, 0)[0]
    found = compared(pool)
    assert (
        set(found.words) == {COLLATERAL}
        and found.words[COLLATERAL] == region.shape[2] * region.shape[3] * region.lanes
    )
    assert f"block {block} holds token 5 of owner 7 of {region.layer}" in diagnose_pool(found)


@SETTINGS
@given(pools(with_state=False), st.integers(1, 15))
def test_rows_may_come_from_any_rank(pool, rank):
    loaded(pool)
    positions = np.arange(pool.tokens)
    for region in pool.regions:
        write_tokens(
            pool.storage,
            region,
            np.array(pool.held[region.layer])[positions // region.block_size],
            positions,
            3,
            0,
            rank,
        )
    assert not compared(pool).wrong


@SETTINGS
@given(pools(with_state=False))
def test_a_prefix_that_was_not_due_must_not_change(pool):
    loaded(pool)
    region = pool.regions[0]
    block = pool.held[region.layer][0]
    region.of(pool.storage)[block, 0] = token_rows(region, token_parts([9], [3]), 1, 0)[0]
    assert set(compared(pool).words) == {MOVED}
    assert set(compared(pool, due={layer: blocks[1:] for layer, blocks in pool.held.items()}).words) == {
        COLLATERAL
    }


@SETTINGS
@given(pools(), st.integers(1, 40))
def test_the_result_is_bounded_and_can_be_pickled(pool, most):
    found = compared(pool, most=most)
    assert found.wrong == compared(pool).wrong
    biggest = max(int(np.prod(region.shape[1:-1])) * region.lanes for region in pool.regions)
    assert len(found.runs) <= max(most, biggest) + (len(found.words) + 1) * biggest
    assert found.words.keys() <= {*found.runs["kind"].tolist(), *([COLLATERAL] if len(found.raw) else [])}, (
        "a kind without an example"
    )
    again = pickle.loads(pickle.dumps(found))
    assert count_pool(again) == count_pool(found) and draw_pool(again) == draw_pool(found)


def test_a_rare_kind_is_kept_however_much_else_is_wrong():
    """One moved row among a thousand that were never written: the diagnosis needs its run."""
    region = attention("l", 0, "nhp", 0, 4 * 2 * 16, 1000, 4, 1, 2, 16)
    storage = np.zeros(1000 * 4 * 2 * 16, dtype=np.uint8)
    poison(storage, 1)
    shadow, tokens = storage.copy(), np.arange(4, 4000)
    write_tokens(shadow, region, tokens // 4, tokens, 0, 0, 0)
    region.of(storage)[501, 2] = token_rows(region, token_parts([7], [0]), 0, 0)[0]
    found = compare_pool(storage, shadow, [region], {"l": range(1, 1000)}, engine=1, most=50)
    assert found.truncated and found.words[MOVED] == 4 and len(found.pairs(MOVED)[0])
    assert "token is off by -1999" in diagnose_pool(found)


@SETTINGS
@given(pools(), st.data())
def test_rows_in_one_piece_have_the_kinds_of_their_words(pool, data):
    """Rows of other places, poison, zeros and torn rows, where something was due and elsewhere."""
    loaded(pool)
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    for region in pool.regions:
        view = region.of(pool.storage).reshape(region.shape[0], -1, region.width)
        for _ in range(data.draw(st.integers(0, 4))):
            block, row, other = (
                int(random.integers(n)) for n in (view.shape[0], view.shape[1], view.shape[1])
            )
            what = random.integers(4)
            view[block, row] = (view[block, other], view[0, 0], 0, np.roll(view[block, row], 8))[what]
    short = compare_pool(pool.storage, pool.shadow, pool.regions, pool.held, engine=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "pytest_kvconform.kvspace.pools.attribute.in_one_piece",
            lambda rows, known: np.zeros(len(rows), dtype=bool),
        )
        long = compare_pool(pool.storage, pool.shadow, pool.regions, pool.held, engine=1)
    assert (
        short.words == long.words
        and short.rows == long.rows
        and (short.runs == long.runs).all()
        and (short.raw == long.raw).all()
    )
    assert [(c.region, c.plane, c.blocks.tolist(), c.kinds.tolist()) for c in short.cells] == [
        (c.region, c.plane, c.blocks.tolist(), c.kinds.tolist()) for c in long.cells
    ]
