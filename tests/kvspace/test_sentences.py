"""diagnose_pool and diagnose_source: the sentence for each kind of mistake.

The pool has an attention layer of two heads, a draft layer and a state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pytest_kvconform.kvspace.kinds import MOVED
from pytest_kvconform.kvspace.pools.compare import compare_pool
from pytest_kvconform.kvspace.pools.diagnose import count_pool, diagnose_pool, diagnose_source
from pytest_kvconform.kvspace.pools.draw import draw_pool
from pytest_kvconform.kvspace.pools.poison import poison_bytes
from pytest_kvconform.kvspace.pools.regions import write_state, write_tokens
from pytest_kvconform.kvspace.pools.sentences import layers_of
from tests.kvspace.pools import Pool, attention, state

MAIN, DRAFT, KDA = (
    "model.layers.0.self_attn.attn",
    "model.layers.1.self_attn.attn",
    "model.layers.2.linear_attn",
)
BLOCKS, N, TOKENS, WIDTH = 20, 16, 90, 32
PAGE = N * 2 * 2 * WIDTH
TABLE, SLOT = (3, 9, 5, 12, 7, 15), (4,)


def pool() -> Pool:
    regions = [
        attention(name, number, "hnp", number * PAGE * BLOCKS, PAGE, BLOCKS, N, 2, 2, WIDTH)
        for number, name in ((0, MAIN), (1, DRAFT))
    ]
    regions += state(KDA, 2, 0, PAGE, BLOCKS, (16, 16, 32, 4), (6, 6, 6, 64))
    storage = np.zeros(2 * PAGE * BLOCKS, dtype=np.uint8)
    made = Pool(storage, storage.copy(), tuple(regions), PAGE, TOKENS).start(
        {MAIN: TABLE, DRAFT: TABLE, KDA: SLOT}
    )
    made.storage[:] = made.shadow
    return made


def explained(change: Callable[[Pool], None], **more) -> str:
    made = pool()
    change(made)
    found = compare_pool(made.storage, made.shadow, made.regions, made.held, engine=1)
    assert found.wrong and count_pool(found) and 0 < len(draw_pool(found)) <= 20
    return diagnose_pool(found, drafts={DRAFT}, **more)


def write(
    made: Pool,
    tokens: np.ndarray,
    holds: np.ndarray,
    layer: int = 0,
    owner: int = 3,
    engine: int = 0,
    as_layer: int | None = None,
) -> None:
    """Put the rows of tokens `holds` where `tokens` belong."""
    region = made.regions[layer]
    scratch = np.zeros_like(made.storage)
    blocks = np.array(TABLE)
    source = made.regions[layer if as_layer is None else as_layer]
    many = np.arange(-(-(int(holds.max()) + 1) // N))
    for token, held in zip(tokens.tolist(), holds.tolist(), strict=True):
        write_tokens(scratch, source, many[held // N], [held], owner, engine, 0)
        region.of(made.storage)[blocks[token // N], token % N] = source.of(scratch)[many[held // N], held % N]


def unwrite(made: Pool, layer: int, blocks: tuple[int, ...], engine: int = 1) -> None:
    other = poison_bytes(0, len(made.storage), engine)
    for region in made.regions[layer : layer + 1] if layer < 2 else made.regions[2:]:
        rows = region.of(made.storage)[list(blocks)]
        data = region.of(made.shadow)[list(blocks)].min(axis=-1) < 0x80  # rows that are due
        rows[data] = region.of(other)[list(blocks)][data]
        region.of(made.storage)[list(blocks)] = rows


ALL = np.arange(TOKENS)


def exchange_heads(made: Pool) -> None:
    view, due = made.regions[0].of(made.storage), made.regions[0].of(made.shadow)
    view[list(TABLE)] = due[list(TABLE)][:, :, ::-1]


def exchange_planes(made: Pool) -> None:
    view, due = made.regions[0].of(made.storage), made.regions[0].of(made.shadow)
    view[list(TABLE)] = due[list(TABLE)][:, :, :, ::-1]


def window(made: Pool) -> None:
    """The table of a sliding window: the first blocks are not there."""
    made.held = {layer: blocks[2:] if layer == MAIN else blocks for layer, blocks in made.held.items()}
    made.storage[:] = made.shadow
    unwrite(made, 0, TABLE[2:3])


def one_token(made: Pool) -> None:
    other = poison_bytes(0, len(made.storage), 1)
    rows, poison = (made.regions[0].of(memory)[TABLE[0], 3] for memory in (made.storage, other))
    rows[:] = poison


def half_of_the_blocks_again(made: Pool) -> None:
    write(made, ALL[64:], ALL[64:] - 32)


def zero_blocks(made: Pool) -> None:
    made.regions[0].of(made.storage)[list(TABLE[:2])] = 0


def flip(made: Pool) -> None:
    made.regions[0].of(made.storage)[TABLE[2], 3, 1, 0, 9] ^= 4


def outside(made: Pool) -> None:
    write_tokens(made.storage, made.regions[0], 17, [5], 3, 0, 0)


def later_state(made: Pool) -> None:
    for region in made.regions[2:]:
        write_state(made.storage, region, 4, 3, 95, 0, 0)


def conv_of_others(made: Pool) -> None:
    made.regions[3].of(made.storage)[4, 8:] = made.regions[2].of(made.shadow)[4, :8]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda made: write(made, ALL[16:], ALL[16:] - 16),
            "from token 16 on, each place holds the prefiller's token from 16 positions earlier",
        ),
        (lambda made: write(made, ALL, ALL + 16), "block is off by +1 in all 1440 words"),
        (lambda made: write(made, ALL, ALL + 3), "token is off by +3 in all 1440 words"),
        (
            half_of_the_blocks_again,
            "from token 64 on, each place holds the prefiller's token from 32 positions earlier in all",
        ),
        (
            lambda made: write(made, ALL[:32], ALL[:32] ^ 16),
            "block 0 and block 1 are exchanged in all 512 words",
        ),
        (exchange_heads, "head 0 and head 1 are exchanged"),
        (exchange_planes, "K and V are exchanged"),
        (lambda made: write(made, ALL, ALL, as_layer=1), f"{MAIN} holds rows of {DRAFT} in all"),
        (lambda made: write(made, ALL, ALL, owner=5), "rows of another request (owner 5)"),
        (
            lambda made: write(made, ALL, ALL, engine=1),
            "rows that the decoder computed instead of the prefiller",
        ),
        (window, "the first block of the window was never written"),
        (lambda made: unwrite(made, 0, TABLE[:1]), "the first block was never written"),
        (lambda made: unwrite(made, 0, TABLE[-1:]), "the last (partial) block was never written"),
        (lambda made: unwrite(made, 1, TABLE), f"no byte of {DRAFT} (draft) was written"),
        (
            lambda made: unwrite(made, 1, TABLE, engine=0),
            f"words in {DRAFT} (draft) were copied from memory that the prefiller had not written by then",
        ),
        (lambda made: unwrite(made, 0, TABLE[1:3]), "tokens 16-47 were never written"),
        (one_token, "token 3 was never written"),
        (lambda made: unwrite(made, 2, SLOT), f"no byte of {KDA} was written"),
        (outside, f"wrote outside its own blocks: block 17 holds token 5 of owner 3 of {MAIN}"),
        (later_state, "state of 95 tokens instead of 90"),
        (
            lambda made: write_state(made.storage, made.regions[2], 4, 3, 95, 0, 0),
            "state of 95 tokens (mod 251) instead of 90",
        ),
        (conv_of_others, "convolution K was cut across segments: channels 8-15 hold convolution Q"),
    ],
)
def test_the_sentence(change, expected):
    sentence = explained(change)
    assert expected in sentence and "\n" not in sentence


def test_zeros_garbled_words_and_an_early_report():
    def zero(made: Pool) -> None:
        made.regions[0].of(made.storage)[TABLE[2]] = 0

    assert "tokens 32-47 hold zeros" in explained(zero)
    assert "1 word in " in explained(flip) and "neither KV nor poison" in explained(flip)
    early = explained(lambda made: unwrite(made, 1, TABLE), later_right=True)
    assert "were still unwritten when the load was reported complete" in early


def test_all_layers_are_counted_however_few_runs_are_kept():
    made = pool()
    for layer in (0, 1):
        exchange = made.regions[layer].of(made.storage)
        exchange[list(TABLE)] = made.regions[layer].of(made.shadow)[list(TABLE)][:, :, ::-1]
    found = compare_pool(made.storage, made.shadow, made.regions[:2], {MAIN: TABLE, DRAFT: TABLE}, most=10)
    assert found.truncated and len(set(found.runs["region"].tolist())) == 1
    assert layers_of(found) == layers_of(found, MOVED) == f"{MAIN} and {DRAFT}"


@pytest.mark.parametrize(
    ("change", "held"),
    [
        (lambda made: unwrite(made, 0, TABLE[:2]), "memory that the decoder had not written"),
        (lambda made: write(made, ALL, ALL, engine=1), "what the decoder computed"),
        (zero_blocks, "zeros"),
        (flip, "bytes that are neither KV nor poison"),
    ],
)
def test_the_sentence_on_a_write_into_p_s_pool(change, held):
    made = pool()
    change(made)
    found = compare_pool(made.storage, made.shadow, made.regions, made.held, engine=0)
    assert diagnose_source(found).startswith(
        f"P's pool was written to, but loads only read it: {found.wrong} word"
    )
    assert diagnose_source(found).endswith(f" of {MAIN} hold {held}")


def test_the_picture_shows_the_blocks_in_table_order():
    made = pool()
    unwrite(made, 0, TABLE[1:2])
    found = compare_pool(made.storage, made.shadow, made.regions, made.held)
    lines = draw_pool(found)
    assert lines[0].split() == ["block", *map(str, TABLE)]
    assert lines[1].split() == ["layers.0.self_attn", "K", ".", "-", ".", ".", ".", "."]
    assert lines[2].split()[1] == "V" and "(6 rows are correct)" in lines[3]


def test_what_no_transfer_can_have_brought_is_not_called_a_load():
    """The decoder's own words, and bytes that are none, in a block where nothing was due."""

    def own(made: Pool) -> None:
        write_tokens(made.storage, made.regions[0], 17, [5], 3, 1, 0)

    def noise(made: Pool) -> None:
        made.regions[0].of(made.storage)[17, 0, 0, 0] = 0x55

    for change in (own, noise):
        assert explained(change).startswith("something wrote where nothing was due: block 17 holds")
