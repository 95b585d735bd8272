"""words.py, regions.py, poison.py: each address has its own bytes, and accidents are recognised as such."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_kvconform.kvspace.pools.addresses import ATTENTION, COORDINATES, FOREIGN, POISON, STATE
from pytest_kvconform.kvspace.pools.poison import QUIET_NANS, WRAP, poison, poison_bytes, same_place
from pytest_kvconform.kvspace.pools.regions import (
    Region,
    state_rows,
    token_parts,
    token_rows,
    write_state,
    write_tokens,
)
from pytest_kvconform.kvspace.pools.words import FORMATS, decode, encode
from tests.kvspace.pools import attention

HIGH = 0x80


def integers(end: int) -> st.SearchStrategy[int]:
    return st.integers(0, end - 1) | st.sampled_from([0, end - 1])


@st.composite
def addresses(draw: st.DrawFn, kind: int, size: int = 8) -> np.ndarray:
    at = np.full(1, -1, dtype=COORDINATES)
    at["kind"], at["layer"], at["owner"], at["engine"] = (
        kind,
        draw(integers(128)),
        draw(integers(256)),
        draw(integers(2)),
    )
    if kind == ATTENTION:
        at["rank"], at["token"], at["head"] = draw(integers(16)), draw(integers(16384)), draw(integers(256))
        at["plane"], at["lane"] = draw(integers(2)), draw(integers(288))
    else:
        at["token"] = draw(integers(251)) if size == 6 else 1 + draw(integers(16384))
        at["head"], at["plane"], at["lane"] = (
            draw(integers(65536)),
            draw(integers(4)),
            draw(integers(288)) if size == 8 else 0,
        )
    return at


@pytest.mark.parametrize(("kind", "size"), [(ATTENTION, 8), (STATE, 8), (STATE, 7), (STATE, 6)])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_address_within_the_limits_has_a_word_of_its_own(kind, size, data):
    """`decode` undoes `encode`. Two addresses with the same word could not both be restored."""
    at = data.draw(addresses(kind, size))
    word = encode(at, size)
    assert decode(word, size) == at
    assert word[0] < 1 << (8 * size - 1), "the top bit of the last byte tells data from poison"


def test_words_of_different_kinds_differ():
    for size in (8, 7, 6):
        data = [form for (kind, bytes_), form in FORMATS.items() if bytes_ == size and kind != POISON]
        for form in data:
            assert form.bits == 8 * size - 1 and 0 < form.magic < 1 << (form.bits - form.used)
        short = min(form.bits - form.used for form in data)
        assert len({form.magic >> (form.bits - form.used - short) for form in data}) == len(data)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, (8 << 38) - 4096), st.integers(0, 1))
@example(WRAP - 24, 1)
def test_poison_holds_its_offset_and_is_never_data(start, engine):
    found = poison_bytes(start, start + 100, engine)
    assert len(found) == 100 and (found >= HIGH).all()
    words = found[-start % 8 :][:80].view(np.uint64)
    decoded = decode(words)
    assert (decoded["kind"] == POISON).all() and (decoded["engine"] == engine).all()
    assert decoded["offset"].tolist() == [(start + -start % 8 + 8 * i) % WRAP for i in range(10)]
    assert same_place(decoded["offset"], start + -start % 8 + 8 * np.arange(10)).all()
    assert (encode(decoded) == words).all()


@pytest.mark.parametrize("engine", [0, 1])
def test_poison_is_a_quiet_nan_of_every_float(engine):
    found = poison_bytes(0, WRAP, engine)
    for dtype, quiet in ((np.float16, 9), (np.float32, 22)):
        assert np.isnan(found.view(dtype)).all()
        assert (found.view(f"u{dtype().nbytes}") >> quiet & 1).all()
    halves = found.view(np.uint16)  # bfloat16: 8 bits of exponent, 7 of mantissa
    assert ((halves >> 7 & 0xFF) == 0xFF).all() and (halves >> 6 & 1).all()
    assert (found[1::2] & 0x7F == 0x7F).all()  # NaN of float8_e4m3fn and of float8_e5m2


@pytest.mark.parametrize("width", [8, 17, 70, 256, 1152, 2304])
def test_any_8_bytes_of_data_have_a_byte_below_poison(width):
    region = attention("l", 127, "hnp", 0, 4 * 2 * width, 2, 4, 1, 2, width, 255)
    data = token_rows(region, token_parts(np.arange(64) + 16320, 255), 1, 15).ravel()
    assert (np.lib.stride_tricks.sliding_window_view(data, 8).min(axis=1) < HIGH).all()


@pytest.mark.parametrize("width", [6, 7, 8, 12, 14, 1024])
def test_rows_of_states_are_all_different(width):
    rows = set()
    for segment in range(4):
        region = Region("l", 5, "state", segment, 0, (1, 300, width), (300 * width, width, 1), 40, 0)
        for owner, tokens in ((0, 1), (0, 2), (255, 1), (0, 250)):
            rows |= {row.tobytes() for row in state_rows(region, owner, tokens, 0)}
    assert len(rows) == 4 * 4 * 300


@pytest.mark.parametrize(
    ("kind", "size", "chance"),
    [(ATTENTION, 8, 2048), (STATE, 8, 64), (STATE, 7, 128), (STATE, 6, 32), (POISON, 8, 4)],
)
def test_an_accident_passes_as_an_address_as_rarely_as_the_docstring_says(kind, size, chance):
    random = np.random.default_rng(3)
    words = random.integers(0, 1 << (8 * size - 1), 400_000, dtype=np.uint64)
    if kind == POISON:
        words |= QUIET_NANS
    hits = int((decode(words, size)["kind"] == kind).sum())
    assert 0.6 * len(words) / chance < hits < 1.5 * len(words) / chance


def test_flipped_and_torn_words_are_no_address():
    region = attention("l", 3, "hnp", 0, 8 * 16 * 2 * 256, 2, 16, 8, 2, 256)
    words = token_rows(region, token_parts(np.arange(16), 0), 0, 0).view(np.uint64).ravel()
    flipped = np.concatenate([words ^ np.uint64(1 << bit) for bit in range(64)])
    assert (decode(flipped)["kind"] != FOREIGN).mean() < 1.3 * (1 / 2048 + 1 / 64)
    assert (decode(flipped)["kind"] == ATTENTION).mean() < 1.3 / 2048
    torn = np.concatenate(
        [
            (words[1:] & np.uint64((1 << bits) - 1)) | (words[:-1] & ~np.uint64((1 << bits) - 1))
            for bits in range(8, 64, 8)
        ]
    )
    # words in sequence may agree in a byte
    assert (decode(torn)["kind"] == ATTENTION).mean() < 1.3 / 2048 + 1 / 256


def test_zeros_and_ones_are_no_address():
    for size in (6, 7, 8):
        assert decode(np.array([0, (1 << (8 * size)) - 1], dtype=np.uint64), size)["kind"].tolist() == [
            FOREIGN,
            FOREIGN,
        ]


def test_written_rows_can_be_read_and_the_rest_keeps_its_poison():
    storage = np.zeros(3000, dtype=np.uint8)
    region = attention("l", 9, "nhp", 100, 4 * 3 * 2 * 17, 5, 4, 3, 2, 17, 6)
    poison(storage, 1)
    before = storage.copy()
    write_tokens(storage, region, [4, 1, 1], [2, 4, 7], [8, 9, 8], 0, 3)
    rows = token_rows(region, token_parts([2, 4, 7], [8, 9, 8]), 0, 3)
    view, old = region.of(storage), region.of(before)
    assert (view[4, 2] == rows[0]).all() and (view[1, 0] == rows[1]).all() and (view[1, 3] == rows[2]).all()
    assert (storage != before).sum() <= 3 * 3 * 2 * 17
    at = decode(np.ascontiguousarray(view[1, 3, 2, 1, 8:16]).view(np.uint64))[0]
    assert (at["token"], at["owner"], at["head"], at["plane"], at["lane"], at["layer"], at["rank"]) == (
        7,
        8,
        8,
        1,
        1,
        9,
        3,
    )
    view[4, 2] = old[4, 2]
    poison(storage, 1, [region], [1])
    assert (storage == before).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"number": 128}, "layer"),
        ({"first": 253}, "heads 253"),
        ({"shape": (2, 4, 4, 2, 4)}, "row of 4 bytes"),
        ({"shape": (2, 4, 4, 2, 2312)}, "row of 2312 bytes"),
        ({"kind": "state"}, "cannot have shape"),
    ],
)
def test_regions_beyond_the_limits_are_refused(change, sentence):
    whole = {
        "layer": "l",
        "number": 1,
        "kind": "attention",
        "segment": 0,
        "offset": 0,
        "shape": (2, 4, 4, 2, 16),
    }
    whole |= {"strides": (512, 128, 32, 16, 1), "first": 0, "block_size": 4} | change
    with pytest.raises(ValueError, match=sentence):
        Region(**whole)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"tokens": [16384]}, "token 16384"),
        ({"owners": 256}, "owner 256"),
        ({"engine": 2}, "engine 2"),
        ({"rank": 16}, "rank 16"),
        ({"blocks": 2}, "block 2"),
        ({"tokens": [-1]}, "token -1"),
    ],
)
def test_values_beyond_the_limits_are_refused(values, sentence):
    storage, region = np.zeros(1024, dtype=np.uint8), attention("l", 1, "hnp", 0, 512, 2, 4, 4, 2, 16)
    with pytest.raises(ValueError, match=sentence):
        write_tokens(
            storage, region, **({"blocks": 0, "tokens": [0], "owners": 0, "engine": 0, "rank": 0} | values)
        )
    with pytest.raises(ValueError, match="tokens of a state"):
        write_state(storage, Region("l", 1, "state", 0, 0, (1, 4, 6), (64, 6, 1), 0, 0), 0, 0, 16385, 0, 0)
    with pytest.raises(ValueError, match="leave 100 bytes"):
        region.of(storage[:100])
