"""Prompt lengths have every residue at which an index can be off by one, for any block size and window."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_matrix.families import load_families
from model_matrix.prompts import prompt_lengths

MATRICES = st.sampled_from(["quick", "full"])


def windowed(window: int):
    return msgspec.structs.replace(load_families()["gpt_oss"], sliding_window=window)


@given(block=st.integers(2, 512), window=st.integers(0, 2048), matrix=MATRICES)
def test_every_block_residue_is_there(block, window, matrix):
    lengths = prompt_lengths(windowed(window), block, matrix)
    assert lengths == tuple(sorted(set(lengths)))
    assert lengths[0] == 1
    for wanted in (-1, 0, 1):
        assert len([n for n in lengths if n % block == wanted % block and n >= block - 1]) >= 2
    assert any(n > 6 * block and n % block for n in lengths)


@given(block=st.integers(2, 512), window=st.integers(2, 2048), matrix=MATRICES)
def test_every_window_residue_is_there(block, window, matrix):
    lengths = set(prompt_lengths(windowed(window), block, matrix))
    assert {window - 1, window, window + 1} <= lengths
    layouts = [n for n in range(window - 1 + block, window + 9 * block) if (n - window + 1) % block == 0]
    for n in layouts[: 2 if matrix == "quick" else 4]:
        assert {n - 1, n, n + 1} <= lengths


def test_the_lengths_at_which_vllm_loses_a_key_are_in_quick():
    families = load_families()
    assert {63, 95} <= set(prompt_lengths(families["gemma3"], 32, "quick"))
    assert {95, 127} <= set(prompt_lengths(families["gpt_oss"], 32, "quick"))


def test_a_state_adds_its_own():
    lengths = prompt_lengths(load_families()["qwen3_5"], 64, "quick")
    assert {1, 2, 4, 63, 64, 65, 127, 128, 129} < set(lengths)


@pytest.mark.parametrize("family", load_families().values(), ids=lambda family: family.id)
def test_each_matrix_has_a_readable_number_of_lengths(family):
    quick, full = (prompt_lengths(family, family.block_size, matrix) for matrix in ("quick", "full"))
    assert (5 if family.draft else 8) <= len(quick) <= 14
    assert len(quick) < len(full) <= 30
    assert set(quick) <= set(full)
    assert full[-1] < family.config["max_position_embeddings"]


def test_wrong_arguments():
    llama = load_families()["llama"]
    with pytest.raises(ValueError, match="a block of 1 tokens"):
        prompt_lengths(llama, 1, "quick")
    with pytest.raises(KeyError, match="quik"):
        prompt_lengths(llama, 32, "quik")
