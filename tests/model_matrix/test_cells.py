"""The matrix expands to the cells that its file lists, and a wrong word is answered with the right ones."""

import pytest

from model_matrix.cells import FILE, MatrixError, UnknownName, expand, parse_topology, read_matrices
from model_matrix.families import load_families

QUICK = ["P1D1", "P1D2", "P2D1"]


def test_quick_is_every_family_in_both_directions():
    assert expand("quick") == [(family, topology) for family in ("llama", "gemma3", "gpt_oss", "qwen3_5") for topology in QUICK]


def test_each_matrix_holds_the_one_before():
    quick, full, nightly = (expand(matrix) for matrix in ("quick", "full", "nightly"))
    assert set(full) - set(quick) == {(family, "P2D2") for family in load_families()}
    assert set(full) < set(nightly)
    assert len(set(nightly)) == len(nightly)


def test_selections_narrow():
    assert expand("full", ["gemma3"], ["P2D2", "P1D1"]) == [("gemma3", "P1D1"), ("gemma3", "P2D2")]
    assert expand("full", topologies=["P2D2"]) == [(family, "P2D2") for family in ("llama", "gemma3", "gpt_oss", "qwen3_5")]
    assert expand("nightly", ["qwen3_5"], ["P1D4"]) == []


def test_every_size_divides_the_model():
    """vLLM replicates KV heads where they are fewer than ranks, but for gpt_oss; everything else must divide."""
    for family, topology in expand("nightly"):
        config = load_families()[family].config
        for size in parse_topology(topology):
            sizes = [config[key] for key in config if key in ("num_attention_heads", "intermediate_size", "vocab_size")]
            sizes += [config[key] for key in config if key.startswith("linear_num_")]
            assert [n % size for n in sizes] == [0] * len(sizes), (family, topology)
            kv_heads = config["num_key_value_heads"]
            assert kv_heads % size == 0 or (size % kv_heads == 0 and family != "gpt_oss"), (family, topology)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("quik",), "matrix called 'quik' (did you mean quick?); there are: quick, full, nightly"),
        (("quick", ["gema3"]), "called 'gema3' (did you mean gemma3?); there are: llama, gemma3, gpt_oss, qwen3_5"),
        (("quick", ["Llama"]), "called 'Llama' (did you mean llama?)"),
        (("quick", ["xyz"]), "called 'xyz'; there are"),
        (("quick", [], ["P2D2"]), "topology 'P2D2' is not in the quick matrix, but in: full, nightly"),
        (("quick", [], ["P1D3"]), "(did you mean P1D2?)"),
        (("quick", [], ["p1d2"]), "'p1d2' is no topology (did you mean P1D2?)"),
    ],
)
def test_unknown_names(arguments, said):
    with pytest.raises(UnknownName) as caught:
        expand(*arguments)
    assert said in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("word", "sizes"), [("P1D2", (1, 2)), ("P2D1", (2, 1)), ("P16D8", (16, 8))])
def test_parse_topology(word, sizes):
    assert parse_topology(word) == sizes


@pytest.mark.parametrize("word", ["", "P1", "P0D1", "P1D2 ", "P1D2\n", "D1P2", "P01D1", "P-1D1", "P1D²", "P١D1"])
def test_no_topology(word):
    with pytest.raises(UnknownName, match="is no topology"):
        parse_topology(word)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[quick]", "[qiuck]", "missing required field `quick`|unknown field `qiuck`"),
        ('llama = ["P1D1", "P1D2", "P2D1"]', 'lama = ["P1D1"]', "quick.lama.*did you mean llama"),
        ('llama = ["P1D1", "P1D2", "P2D1"]', 'llama = ["P1D"]', "'P1D' is no topology"),
        ('llama = ["P1D1", "P1D2", "P2D1"]', 'llama = "P1D1"', r"\$.quick"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, old, new, said):
    assert old in FILE.read_text()
    (tmp_path / "matrix.toml").write_text(FILE.read_text().replace(old, new))
    with pytest.raises(MatrixError, match=f"^matrix.toml: .*({said})"):
        read_matrices(tmp_path / "matrix.toml")
