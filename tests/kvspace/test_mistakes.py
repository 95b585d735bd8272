"""name_mistakes: layout mistakes, made with real bytes page by page, are named; other differences are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvconform.kvspace.kinds import MOVED
from pytest_kvconform.kvspace.pools import mistakes, sources
from pytest_kvconform.kvspace.pools.compare import PoolComparison, compare_pool
from pytest_kvconform.kvspace.pools.diagnose import diagnose_pool
from pytest_kvconform.kvspace.pools.mistakes import name_mistakes
from pytest_kvconform.kvspace.pools.poison import poison
from pytest_kvconform.kvspace.pools.regions import write_tokens
from pytest_kvconform.kvspace.pools.sources import Source
from tests.kvspace.pools import Pool, attention, pools, shuffled, state

SETTINGS = settings(max_examples=30, deadline=None)
LAYER = "model.layers.3.self_attn.attn"
KV_EXCHANGED, REVERSED, NHD_IN_HND, HND_IN_NHD = (mistakes.CATALOGUE[i].name for i in (0, 1, 6, 7))


def one_layer(
    order: str,
    n: int,
    heads: int,
    tokens: int,
    width: int = 64,
    first: int = 0,
    engine: int = 1,
    seed: int = 0,
) -> Pool:
    """A pool with one attention layer, K and V; the page is as wide as the rows."""
    page, blocks = n * heads * 2 * width, -(-tokens // n) + 3
    region = attention(LAYER, 3, order, 0, page, blocks, n, heads, 2, width, first)
    storage = np.zeros(page * blocks, dtype=np.uint8)
    pool = Pool(storage, storage.copy(), (region,), page, tokens, engine)
    return pool.start({LAYER: tuple(shuffled(seed, -(-tokens // n), blocks))})


def pages(pool: Pool, storage: np.ndarray) -> np.ndarray:
    """The pages that the layer holds, in table order: uint8 [block, byte]. A copy."""
    return storage.reshape(-1, pool.page)[list(pool.held[LAYER])]


def put(pool: Pool, content: np.ndarray) -> PoolComparison:
    pool.storage.reshape(-1, pool.page)[list(pool.held[LAYER])] = content
    pool.accept_rows_not_due()
    return compare_pool(pool.storage, pool.shadow, pool.regions, pool.held, engine=pool.engine)


@pytest.mark.parametrize(
    ("theirs", "ours", "name"),
    [
        ("hnp", "hpn", mistakes.PACKED_AS_SPLIT),
        ("nhp", "pnh", mistakes.PACKED_AS_SPLIT),
        ("hpn", "hnp", mistakes.SPLIT_AS_PACKED),
        ("pnh", "nhp", mistakes.SPLIT_AS_PACKED),
        ("nhp", "hnp", NHD_IN_HND),
        ("hnp", "nhp", HND_IN_NHD),
        ("pnh", "phn", NHD_IN_HND),
    ],
)
@SETTINGS
@given(st.integers(3, 8), st.integers(1, 5), st.integers(1, 40), st.sampled_from([16, 17, 64, 70]))
def test_bytes_of_one_layout_in_another_are_named(theirs, ours, name, n, heads, tokens, width):
    prefiller = one_layer(theirs, n, heads, tokens, width, engine=0, seed=1)
    decoder = one_layer(ours, n, heads, tokens, width)
    found = put(decoder, pages(prefiller, prefiller.shadow))
    if found.words.get(MOVED):
        assert name in name_mistakes(found)
        if n != heads and n != 2 * heads and n > 2 and tokens > n:
            # Pages of ranks with one head each, one after the other, are an HND page.
            alike = {mistakes.TOKEN_AXIS} if heads in (2, 4) else set()
            assert name_mistakes(found)[0] == name and set(name_mistakes(found)) <= {name} | alike
    else:  # one head, or only one token: the layouts agree on all that was written
        assert name_mistakes(found) == ()


@SETTINGS
@given(st.integers(3, 8), st.integers(3, 5), st.integers(1, 40))
def test_reversed_heads_and_exchanged_planes_are_named(n, heads, tokens):
    pool = one_layer("hnp", n, heads, tokens)
    right = pages(pool, pool.shadow).reshape(-1, heads, n, 2, 64)
    assert name_mistakes(put(pool, right[:, ::-1].reshape(-1, pool.page))) == (REVERSED,)
    assert name_mistakes(put(pool, right[:, :, :, ::-1].reshape(-1, pool.page))) == (KV_EXCHANGED,)
    pair = right.copy()
    pair[:, [0, 1]] = pair[:, [1, 0]]
    found = put(pool, pair.reshape(-1, pool.page))
    assert name_mistakes(found) == () and "head 0 and head 1 are exchanged" in diagnose_pool(found)


@SETTINGS
@given(
    st.integers(3, 8),
    st.integers(1, 3),
    st.sampled_from([2, 4]),
    st.integers(0, 3),
    st.booleans(),
    st.integers(9, 40),
)
def test_heads_cut_along_the_token_axis_are_named(n, heads, ratio, rank, hnd, tokens):
    """P has all heads in NHD pages; a rank of D takes the part of the page that has its size."""
    rank %= ratio
    prefiller = one_layer("nhp", n * ratio, heads * ratio, tokens, engine=0, seed=1)
    theirs = pages(prefiller, prefiller.shadow)
    decoder = one_layer("hnp" if hnd else "nhp", n * ratio, heads, tokens, first=rank * heads)
    found = put(decoder, theirs[:, rank * decoder.page : (rank + 1) * decoder.page])
    # Nothing has moved if all that was taken is after the last token.
    assert mistakes.TOKEN_AXIS in name_mistakes(found) or MOVED not in found.words


@SETTINGS
@given(st.integers(2, 8), st.integers(1, 3), st.sampled_from([2, 4]), st.integers(9, 40))
def test_pages_of_several_ranks_put_behind_each_other_are_named(n, heads, ratio, tokens):
    ranks = [
        one_layer("nhp", n, heads, tokens, first=rank * heads, engine=0, seed=1) for rank in range(ratio)
    ]
    content = np.concatenate([pages(pool, pool.shadow) for pool in ranks], axis=1)
    found = put(one_layer("nhp", n, heads * ratio, tokens), content)
    assert mistakes.TOKEN_AXIS in name_mistakes(found)
    right = one_layer("hnp", n, heads * ratio, tokens)
    ranks = [
        one_layer("hnp", n, heads, tokens, first=rank * heads, engine=0, seed=1) for rank in range(ratio)
    ]
    assert not put(right, np.concatenate([pages(pool, pool.shadow) for pool in ranks], axis=1)).wrong


@SETTINGS
@given(
    st.sampled_from([2, 4]),
    st.integers(0, 3),
    st.tuples(*[st.sampled_from([4, 8, 12])] * 3),
    st.sampled_from([6, 8, 12]),
    st.booleans(),
)
def test_a_convolution_cut_in_one_piece_is_named(ratio, rank, sizes, conv, wider):
    rank %= ratio
    widths = (conv, conv, conv, 64)
    small, large = (*sizes, 4), (*(size * ratio for size in sizes), 4 * ratio)

    def pool(channels: tuple[int, ...], number: int) -> Pool:
        page = sum(c * w for c, w in zip(channels, widths, strict=True))
        regions = tuple(state("layers.0", 0, 0, page, 3, channels, widths, number))
        return Pool(
            np.zeros(3 * page, dtype=np.uint8), np.zeros(3 * page, dtype=np.uint8), regions, page, 94
        ).start({"layers.0": (1,)})

    part = conv * sum(sizes)
    if wider:
        prefiller, decoder = pool(large, 0), pool(small, rank)
        piece = prefiller.shadow.reshape(3, -1)[1, rank * part : (rank + 1) * part]
    else:
        decoder = pool(large, 0)
        piece = np.concatenate(
            [p.shadow.reshape(3, -1)[1, :part] for p in (pool(small, number) for number in range(ratio))]
        )
    decoder.storage[:] = decoder.shadow
    decoder.storage.reshape(3, -1)[1, : len(piece)] = piece
    found = compare_pool(decoder.storage, decoder.shadow, decoder.regions, decoder.held)
    assert name_mistakes(found) == (mistakes.CONV_CUT,)
    assert "cut in one piece" in diagnose_pool(found)


@SETTINGS
@given(pools(groups=3, with_state=False))
def test_ids_of_one_group_used_for_all_are_named(pool):
    """The copy is right except that what is read for each layer is the memory of the first group's blocks."""
    for region in pool.regions:
        first = next(other for other in pool.regions if other.offset == region.offset)
        region.of(pool.storage)[list(pool.held[region.layer])] = region.of(pool.shadow)[
            list(pool.held[first.layer])
        ]
    pool.accept_rows_not_due()
    found = compare_pool(pool.storage, pool.shadow, pool.regions, pool.held)
    assert name_mistakes(found) == (mistakes.ONE_GROUP,)
    assert mistakes.ONE_GROUP in diagnose_pool(found)


@SETTINGS
@given(st.integers(2, 6), st.integers(1, 3), st.integers(8, 40), st.integers(0, 9))
def test_the_local_stride_used_for_remote_blocks_is_named(n, heads, tokens, seed):
    """Two layers. P has a gap after each page, like the pages of other layers in BLHNC; D has none."""
    rows, count = n * heads * 2 * 64, -(-tokens // n)
    theirs = attention(LAYER, 3, "hnp", rows, 2 * rows, count + 4, n, heads, 2, 64)
    source = np.zeros(2 * rows * (count + 5), dtype=np.uint8)
    poison(source, 0)
    table = shuffled(seed, count, count + 4)
    for number in (2, 3):
        at = attention(
            f"l{number}", number, "hnp", rows * (number == 3), 2 * rows, count + 4, n, heads, 2, 64
        )
        write_tokens(source, at, np.array(table)[np.arange(tokens) // n], np.arange(tokens), 3, 0, 0)
    decoder = one_layer("hnp", n, heads, tokens)
    content = np.stack([source[rows + block * rows :][:rows] for block in table])
    twin = attention("l2", 2, "hnp", 0, 2 * rows, count + 4, n, heads, 2, 64)
    decoder.storage.reshape(-1, decoder.page)[list(decoder.held[LAYER])] = content
    decoder.accept_rows_not_due()
    found = compare_pool(
        decoder.storage, decoder.shadow, decoder.regions, decoder.held, engine=1, others=[theirs, twin]
    )
    assert name_mistakes(found, Source((theirs, twin), {(LAYER, 3): table, ("l2", 3): table})) == (
        mistakes.LOCAL_STRIDE,
    )
    assert mistakes.LOCAL_STRIDE not in name_mistakes(found)  # P's blocks are needed for this name


@SETTINGS
@given(st.integers(3, 16), st.integers(1, 4), st.integers(1, 60), st.integers(0, 99))
def test_blocks_read_before_anything_was_written_are_named(n, heads, tokens, seed):
    """P's poison holds the offset of the right place."""
    prefiller = one_layer("hnp", n, heads, tokens, engine=0, seed=seed)
    prefiller.poison()
    (region,), table = prefiller.regions, prefiller.held[LAYER]
    source = Source((region,), {(LAYER, 3): table}, dict.fromkeys(table, (3,)))
    found = put(one_layer("hnp", n, heads, tokens), pages(prefiller, prefiller.storage))
    assert name_mistakes(found, source) == (sources.TOO_EARLY,)
    assert (
        diagnose_pool(found, source=source)
        == f"{sources.TOO_EARLY}: this explains all {found.wrong} words in {LAYER}"
    )
    assert name_mistakes(found) == ()  # P's blocks are needed for this name
    elsewhere = Source((region,), {(LAYER, 3): [block + 1 for block in table]}, source.writers)
    assert name_mistakes(found, elsewhere) == ()
    unknown = Source((region,), {(LAYER, 3): table})  # P may never have computed it
    assert name_mistakes(found, unknown) == ()
    assert "were copied from memory that the prefiller had not written by then" in diagnose_pool(
        found, source=unknown
    )


@pytest.mark.parametrize(
    ("writers", "name"),
    [
        ((9, 3), (sources.TOO_EARLY,)),
        ((3, 9), (sources.TOO_LATE,)),
        ((3, 7, 9, 8), (sources.TOO_LATE,)),
        ((9, 3, 9), ()),  # before or after
        ((9,), ()),
        ((3,), ()),  # the words of 9 are from elsewhere
    ],
)
@pytest.mark.parametrize("poisoned", [False, True])
def test_words_of_another_request_stood_there_before_or_after(writers, name, poisoned):
    """In the right places there are the words of request 9, in one block perhaps poison."""
    prefiller = one_layer("hnp", 16, 2, 55, engine=0, seed=1)
    (region,), table = prefiller.regions, prefiller.held[LAYER]
    tokens = np.arange(64)
    write_tokens(prefiller.storage, region, np.array(table)[tokens // 16], tokens, 9, 0, 0)
    tables = {(LAYER, 3): table, (LAYER, 9): table}
    if poisoned:
        poison(prefiller.storage, 0, [region], [table[1]])
    found = put(one_layer("hnp", 16, 2, 55), pages(prefiller, prefiller.storage))
    source = Source((region,), tables, dict.fromkeys(table, writers))
    if poisoned and name == (sources.TOO_LATE,):
        name = (sources.EARLY_AND_LATE,)
    assert name_mistakes(found, source) == name
    said = diagnose_pool(found, source=source)
    assert said.startswith(name[0] if name else "rows of another request (owner 9)"), said


@pytest.mark.parametrize(("tokens", "heads"), [(54, 8), (49, 3), (63, 8)])
def test_a_token_that_only_the_prefiller_computed_hides_no_name(tokens, heads):
    """P and D both compute the last token of a prompt. It is not due, but D reads it with its block."""
    prefiller = one_layer("nhp", 16, heads, tokens + 1, engine=0, seed=1)
    found = put(one_layer("hnp", 16, heads, tokens), pages(prefiller, prefiller.shadow))
    assert name_mistakes(found) == (NHD_IN_HND,)


@SETTINGS
@given(pools(), st.integers(0, 999))
def test_a_shuffle_has_no_name_and_is_described(pool, seed):
    """All rows of a region in random order. (An exchange of two rows may well be a mistake with a name.)"""
    region = max(pool.regions, key=lambda r: r.shape[1] * (r.shape[2] if r.kind == "attention" else 1))
    pool.storage[:] = pool.shadow
    view, due = region.of(pool.storage), region.of(pool.shadow)
    if region.kind == "state":
        places = [(pool.held[region.layer][0], channel) for channel in range(region.shape[1])]
    else:
        blocks = pool.held[region.layer]
        places = [
            (blocks[t // region.block_size], t % region.block_size, h, p)
            for t in range(pool.tokens)
            for h in range(region.shape[2])
            for p in range(region.shape[3])
        ]
    if len(places) < 7:
        return
    order = np.random.default_rng(seed).permutation(len(places))
    for place, other in zip(places, order.tolist(), strict=True):
        view[place] = due[places[other]]
    found = compare_pool(pool.storage, pool.shadow, pool.regions, pool.held)
    assert set(found.words) == {MOVED} and name_mistakes(found) == ()
    assert found.rows[MOVED] == int((order != np.arange(len(order))).sum())
    assert diagnose_pool(found)


def test_every_entry_is_named_by_a_test():
    named = {
        KV_EXCHANGED,
        REVERSED,
        NHD_IN_HND,
        HND_IN_NHD,
        mistakes.PACKED_AS_SPLIT,
        mistakes.SPLIT_AS_PACKED,
    }
    assert {mistake.name for mistake in mistakes.CATALOGUE} == named
