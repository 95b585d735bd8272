"""compare_rows and diagnose_rows where ranks of D hold copies of a head: a sentence names the rank."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_kvconform.kvspace.rows.compare import Due, RowComparison, compare_rows
from pytest_kvconform.kvspace.rows.diagnose import count_rows, diagnose_rows
from pytest_kvconform.kvspace.rows.draw import draw_rows
from pytest_kvconform.kvspace.rows.window import missing_window

LAYER, TOKENS, BLOCK, POISON = "model.layers.0.self_attn", 48, 16, 0x4B
LATENT, GROUPED = (1, 1), (2, 2)  # heads and planes of P's rows


def rows(heads: int, planes: int) -> np.ndarray:
    return np.random.default_rng(5).integers(1, 2**32, (TOKENS, heads, planes, 8), np.uint32)


def compare(want: np.ndarray, got: np.ndarray, lost: slice | None = None) -> RowComparison:
    present = np.ones(TOKENS, dtype=bool)
    present[lost or slice(0)] = False
    due = (Due(LAYER, 0, TOKENS, BLOCK, 0),)
    return compare_rows(due, {LAYER: want}, {LAYER: got}, {LAYER: present}, POISON)


@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize("shape", [LATENT, GROUPED])
def test_right_copies_are_right(shape: tuple[int, int], copies: int) -> None:
    want = rows(*shape)
    found = compare(want, want.repeat(copies, axis=1))
    assert (found.wrong, diagnose_rows(found), draw_rows(found)) == (0, "", ())
    assert found.compared_bytes == copies * want.nbytes
    assert found.rows_due == copies * TOKENS * shape[0] * shape[1]


@pytest.mark.parametrize("shape", [LATENT, GROUPED])
@pytest.mark.parametrize(
    ("ranks", "says"), [(slice(None), ""), (slice(1, 2), ", rank 1 only"), (slice(0, 1), ", rank 0 only")]
)
def test_a_shift_is_a_shift_of_tokens_alone(shape: tuple[int, int], ranks: slice, says: str) -> None:
    want = rows(*shape)
    got = want.repeat(2, axis=1)
    got[BLOCK:, ranks] = got[:-BLOCK, ranks]
    found = compare(want, got)
    assert diagnose_rows(found) == f"in all {found.wrong} rows{says}: token is off by -16"
    assert found.wrong == count(got[BLOCK:, ranks])
    assert len(draw_rows(found)) == 1 + shape[1] + 1  # a header, a line for each plane, a legend


def count(changed: np.ndarray) -> int:
    return int(np.prod(changed.shape[:-1]))


def test_latent_attention_has_one_head_whatever_the_ranks() -> None:
    want = rows(*LATENT)
    got = want.repeat(2, axis=1)
    got[:BLOCK, 1] = 0
    found = compare(want, got)
    assert diagnose_rows(found) == f"tokens 0-15 of {LAYER}, rank 1 only holds zeros"
    assert count_rows(found) == "16 of 96 rows differ: 16 zero"
    got[:BLOCK] = 0
    assert diagnose_rows(compare(want, got)) == f"tokens 0-15 of {LAYER} holds zeros"


def test_a_head_and_its_copies() -> None:
    want = rows(*GROUPED)
    got = want.repeat(2, axis=1)
    got[7, 2:, 0] = 0
    assert diagnose_rows(compare(want, got)) == f"token 7 of {LAYER}, K only, head 1 only holds zeros"
    got[7, 2] = want[7, 1]
    assert diagnose_rows(compare(want, got)) == (
        f"token 7 of {LAYER}, K only, head 1 only, rank 3 only holds zeros"
    )
    swapped = want[:, ::-1].repeat(2, axis=1)
    found = compare(want, swapped)
    assert diagnose_rows(found) == f"in all {found.wrong} rows: head 0 and head 1 are exchanged"


def test_a_missing_block_is_missing_in_every_copy() -> None:
    want = rows(*LATENT)
    found = compare(want, want.repeat(2, axis=1), lost=slice(0, BLOCK))
    assert (found.wrong, found.compared_bytes) == (0, 2 * want[BLOCK:].nbytes)
    assert count_rows(found) == "32 of 96 rows differ: 32 not in the cache"
    assert missing_window(found) is None  # the layer has no window


@pytest.mark.parametrize("shape", [(3, 2, 8), (2, 1, 8), (2, 2, 4)])
def test_rows_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        compare(rows(*GROUPED), np.ones((TOKENS, *shape), dtype=np.uint32))
