"""The matrix expands to the cells of its files. An unknown word is answered with the right ones."""

import itertools

import pytest

from model_matrix.cells import (
    ByteMatrices,
    EngineMatrices,
    MatrixError,
    SetupMatrices,
    UnknownName,
    expand,
    load_byte_matrices,
    matrix_file,
    parse_topology,
    read_matrices,
)
from model_matrix.families import load_families
from model_matrix.geometries import load_geometries
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import possible

QUICK = ["P1D1", "P1D2", "P2D1"]
FAMILIES = ["llama", "gemma3", "gpt_oss", "qwen3_5", "kimi_linear", "kimi_k2_5_eagle3"]  # of the quick matrix


def engine(*arguments, **selections):
    """Cells of the engine rig."""
    return [place[:2] for place in expand(*arguments, **selections) if place.rig == "engine"]


def pairs(*arguments, **selections):
    """Cells of the byte rig."""
    return [place[:3] for place in expand(*arguments, **selections) if place.rig == "bytes"]


def test_quick_is_every_family_in_both_directions():
    assert engine("quick") == [(family, topology) for family in FAMILIES for topology in QUICK]


def test_each_matrix_holds_the_one_before():
    quick, full = (engine(matrix) for matrix in ("quick", "full"))
    assert {family for family, _ in full} == set(load_families())
    assert {topology for family, topology in set(full) - set(quick) if family in FAMILIES} == {
        "P2D2",
        "P1D4",
        "P4D2",
    }
    assert set(quick) < set(full)
    assert len(set(full)) == len(full)


def test_selections_narrow():
    assert engine("full", ["gemma3"], ["P2D2", "P1D1"]) == [("gemma3", "P1D1"), ("gemma3", "P2D2")]
    families = [*FAMILIES, "llama_mla_eagle3"]
    assert engine("full", topologies=["P2D2"]) == [(family, "P2D2") for family in families]
    assert engine("full", ["qwen3_5"], ["P1D4"]) == []


def test_a_family_selects_its_geometries_and_a_geometry_itself():
    assert {place[0] for place in pairs("full", ["gemma3"])} == {"gemma3_1b", "gemma3_4b", "gemma3_27b"}
    assert (
        set(pairs("quick", ["gemma3_1b"])) == set(pairs("quick", ["gemma3"]))
        and engine("quick", ["gemma3_1b"]) == []
    )
    assert pairs("quick", ["deepseek_v3"], ["P2D1"]) == [("deepseek_v3", "P2D1", "b16")]


def test_the_byte_rig_sees_every_family_in_quick_and_every_geometry_in_full():
    geometries = load_geometries()
    assert {geometries[place[0]].family for place in pairs("quick")} == {
        geometry.family for geometry in geometries.values()
    }
    assert {place[0] for place in pairs("full")} == set(geometries)
    assert set(pairs("quick")) <= set(pairs("full"))
    assert {place[2] for place in pairs("full")} == set(load_byte_matrices().setups)


def test_every_pair_is_possible():
    for geometry, topology, _ in pairs("full"):
        for size in parse_topology(topology):
            assert possible(load_geometries()[geometry], size) == "", (geometry, topology)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[quick.gemma3_1b]", "[quick.gema3_1b]", "quick.gema3_1b.*did you mean gemma3_1b"),
        ("fp8 = [", "fp9 = [", "setup for quick.llama3_1_8b.fp9.*did you mean fp8"),
        ("block = 32", "blocks = 32", "unknown field `blocks`"),
        ('content = "backend"', 'content = "backend "', "Invalid enum value 'backend '"),
        ('"P8D4"', '"P8D"', "'P8D' is no topology"),
    ],
)
def test_a_mistake_in_the_file_of_the_byte_rig_is_named(tmp_path, old, new, message):
    assert old in matrix_file("bytes").read_text()
    (tmp_path / "bytes.toml").write_text(matrix_file("bytes").read_text().replace(old, new))
    with pytest.raises(MatrixError, match=f"^bytes.toml: .*({message})"):
        read_matrices(tmp_path / "bytes.toml", ByteMatrices)


def test_every_size_divides_the_model():
    """vLLM replicates KV heads where ranks outnumber them, but for gpt_oss; everything else must divide."""
    for family, topology in engine("full"):
        configs = [model.config for model in load_families()[family].models]
        for size, config in itertools.product(parse_topology(topology), configs):
            sizes = [
                config[key]
                for key in config
                if key in ("num_attention_heads", "intermediate_size", "vocab_size")
            ]
            sizes += [config[key] for key in config if key.startswith("linear_num_")]
            sizes += [linear["num_heads"]] if (linear := config.get("linear_attn_config")) else []
            assert [n % size for n in sizes] == [0] * len(sizes), (family, topology)
            kv_heads = config["num_key_value_heads"]
            assert kv_heads % size == 0 or (size % kv_heads == 0 and family != "gpt_oss"), (family, topology)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quik",), "matrix called 'quik' (did you mean quick?); there are: quick, full"),
        (
            ("quick", ["gema3"]),
            "called 'gema3' (did you mean gemma3?); there are: llama, gemma3, gpt_oss, qwen3_5, ",
        ),
        (("quick", ["Llama"]), "called 'Llama' (did you mean llama?)"),
        (("quick", ["xyz"]), "called 'xyz'; there are"),
        (("quick", [], ["P4D4"]), "topology 'P4D4' is not in the quick matrix, but in: full"),
        (("quick", [], ["P1D3"]), "(did you mean P1D2?)"),
        (("quick", [], ["p1d2"]), "'p1d2' is no topology (did you mean P1D2?)"),
    ],
)
def test_unknown_names(arguments, message):
    with pytest.raises(UnknownName) as caught:
        expand(*arguments)
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("word", "sizes"), [("P1D2", (1, 2)), ("P2D1", (2, 1)), ("P16D8", (16, 8))])
def test_parse_topology(word, sizes):
    assert parse_topology(word) == sizes


@pytest.mark.parametrize(
    "word", ["", "P1", "P0D1", "P1D2 ", "P1D2\n", "D1P2", "P01D1", "P-1D1", "P1D²", "P١D1"]
)
def test_no_topology(word):
    with pytest.raises(UnknownName, match="is no topology"):
        parse_topology(word)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[quick]", "[qiuck]", "missing required field `quick`|unknown field `qiuck`"),
        ('llama = ["P1D1", "P1D2", "P2D1"]', 'lama = ["P1D1"]', "quick.lama.*did you mean llama"),
        ('llama = ["P1D1", "P1D2", "P2D1"]', 'llama = ["P1D"]', "'P1D' is no topology"),
        ('llama = ["P1D1", "P1D2", "P2D1"]', 'llama = "P1D1"', r"\$.quick"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, old, new, message):
    assert old in matrix_file("engine").read_text()
    (tmp_path / "engine.toml").write_text(matrix_file("engine").read_text().replace(old, new))
    with pytest.raises(MatrixError, match=f"^engine.toml: .*({message})"):
        read_matrices(tmp_path / "engine.toml", EngineMatrices)


def test_cells_of_the_scheduler_rig_are_cells_of_the_byte_rig_where_both_have_them():
    quick, full = (
        {place[:3] for place in expand(matrix) if place.rig == "scheduler"} for matrix in ("quick", "full")
    )
    assert quick <= full and {place[2] for place in full} <= set(load_byte_matrices().setups)
    assert full <= set(pairs("full"))
    assert {load_geometries()[place[0]].family for place in full} == {
        geometry.family for geometry in load_geometries().values()
    }


def test_a_mistake_in_the_file_of_the_scheduler_rig_is_named(tmp_path):
    (tmp_path / "scheduler.toml").write_text(
        matrix_file("scheduler").read_text().replace("b16 =", "b17 =", 1)
    )
    with pytest.raises(
        MatrixError, match=r"^scheduler\.toml: .*setup for quick\.llama3_1_8b\.b17.*did you mean b16"
    ):
        read_matrices(tmp_path / "scheduler.toml", SetupMatrices)


def test_cells_of_the_rig_of_peers_are_cells_of_the_byte_rig():
    quick, full = (
        {place[:3] for place in expand(matrix) if place.rig == "peers"} for matrix in ("quick", "full")
    )
    assert quick <= set(pairs("quick")) and full <= set(pairs("full")) and quick < full
