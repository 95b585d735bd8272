"""`kv_cache_specs` agrees with vLLM's own models, for every geometry and tensor parallel size."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from model_matrix.geometries import FullAttention, Mla, State, load_geometries
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import block_size_of, kv_heads, possible, state_segments

ROOT = Path(__file__).parents[2]
SIZES = (1, 2, 4, 8)
OPTIONS = ["1 48 auto True", "2 128 auto False", "2 64 fp8 True"]

# Layers of each KV cache group, the same at every tensor parallel size.
GROUPS = {
    "deepseek_v3": [61],
    "gemma3_1b": [4, 4, 4, 4, 4, 3, 3],
    "gemma3_27b": [10] + [9] * 4 + [8] * 2,
    "gemma3_4b": [5] * 6 + [4],
    "gpt_oss_120b": [18] * 2,
    "gpt_oss_20b": [12] * 2,
    "kimi_k2_5_eagle3": [62],
    "kimi_linear_48b": [7, 7, 7, 6],
    "llama3_1_8b": [32],
    "qwen3_5_27b": [16] * 4,
    "qwen3_5_35b_a3b": [10] * 4,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """ "<geometry> <tp> <block size asked for> <cache dtype> <prefix caching>" -> vLLM's specs, ours."""
    command = [sys.executable, "-m", "tests.rigs.specs_of_models", str(tmp_path_factory.mktemp("models"))]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    [line] = [line for line in child.stdout.splitlines() if line.startswith("specs:")] or [child.stderr]
    return json.loads(line.removeprefix("specs:"))


@pytest.mark.parametrize("options", [f"{tp} 32 auto True" for tp in SIZES] + OPTIONS)
@pytest.mark.parametrize("name", load_geometries())
def test_specs_are_those_of_the_model(outcomes, name, options):
    outcome = outcomes[f"{name} {options}"]
    if reason := possible(load_geometries()[name], int(options.split()[0])):
        assert "attention heads" in reason
        assert "must be divisible by tensor parallel size" in outcome["refused"]
        return
    theirs, ours = outcome["block_sizes"]
    assert ours == theirs
    assert outcome["ours"] == outcome["theirs"]  # the same layers in the same order, each with the same spec


@pytest.mark.parametrize(
    ("name", "tp"),
    [(name, tp) for name, g in load_geometries().items() for tp in SIZES if not possible(g, tp)],
)
def test_groups(outcomes, name, tp):
    assert sorted(outcomes[f"{name} {tp} 32 auto True"]["groups"], reverse=True) == GROUPS[name]


def test_a_topology_that_cannot_be_is_one_sentence():
    geometries = load_geometries()
    impossible = {
        (name, tp): reason
        for name in geometries
        for tp in SIZES
        if (reason := possible(geometries[name], tp))
    }
    assert impossible == {("gemma3_1b", 8): "gemma3_1b has 4 attention heads, which do not divide by 8."}
    assert possible(geometries["qwen3_5_27b"], 3) == (
        "Layers of kind 'state' of qwen3_5_27b have 16 key heads, which do not divide by 3."
    )
    assert (
        possible(geometries["kimi_k2_5_eagle3"], 3)
        == "kimi_k2_5_eagle3 has 64 attention heads, which do not divide by 3."
    )
    with pytest.raises(ValueError, match=r"^gemma3_1b has 4 attention heads, which do not divide by 8\.$"):
        block_size_of(geometries["gemma3_1b"], 8, 32)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", SIZES)
def test_heads_of_the_ranks(heads, tp):
    """Every head is somewhere; each is on as many ranks as every other; ranks hold them in order."""
    kind = FullAttention(name="{i}", kv_heads=heads, head_size=8)
    held = [
        list(range(first, first + number))
        for first, number in (kv_heads(kind, tp, rank) for rank in range(tp))
    ]
    flat = [head for ranks in held for head in ranks]
    assert sorted(flat) == flat
    assert np.bincount(flat).tolist() == [max(1, tp // heads)] * heads


def test_every_rank_holds_all_of_a_latent_row():
    kind = Mla(name="{i}", kv_lora_rank=512, rope_head_size=64)
    assert {kv_heads(kind, 8, rank) for rank in range(8)} == {(0, 1)}
    assert kind.head_size == 576


STATES = [
    (name, word)
    for name, g in load_geometries().items()
    for word, kind in g.kinds.items()
    if isinstance(kind, State)
]


@pytest.mark.parametrize("layout", ["DS", "SD"])
@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize(("name", "word"), STATES)
def test_segments_tile_the_state(name, word, tp, layout):
    """The four parts cover each byte of the state once; the ranks' rows together are those of the model."""
    geometry = load_geometries()[name]
    kind = geometry.kinds[word]
    segments = state_segments(geometry, kind, tp, layout)
    assert [segment.name for segment in segments] == ["conv Q", "conv K", "conv V", "ssm"]
    places = [
        segment.offset
        + np.arange(segment.rows)[:, None, None] * segment.row_stride
        + np.arange(segment.elements)[:, None] * segment.element_stride
        + np.arange(segment.element_size)
        for segment in segments
    ]
    covered = np.sort(np.concatenate([place.ravel() for place in places]))
    assert np.array_equal(covered, np.arange(len(covered)))
    assert [segment.first(tp - 1) + segment.rows for segment in segments] == [
        *kind.conv_channels,
        kind.value_heads * kind.head_v,
    ]


@pytest.mark.parametrize("layout", ["DS", "SD"])
@pytest.mark.parametrize(("name", "word"), STATES)
def test_segments_lie_as_the_tensors_of_the_state_do(name, word, layout):
    """Segments agree with arrays of the shapes that vLLM packs.

    Convolution by layout, then [head, head_v, head_k].
    """
    geometry = load_geometries()[name]
    kind = geometry.kinds[word]
    q, _, v = channels = [number // 2 for number in kind.conv_channels]
    conv = np.arange(sum(channels) * (kind.kernel - 1), dtype=np.int16)
    conv = conv.reshape(sum(channels), -1) if layout == "DS" else conv.reshape(-1, sum(channels)).T
    ssm = np.arange(kind.value_heads // 2 * kind.head_v * kind.head_k, dtype=np.float32).reshape(
        -1, kind.head_k
    )
    page = np.concatenate(
        [(conv if layout == "DS" else conv.T).ravel().view(np.uint8), ssm.ravel().view(np.uint8)]
    )
    want = [conv[:q], conv[q : 2 * q], conv[2 * q :], ssm]
    assert len(want[2]) == v
    for segment, rows in zip(state_segments(geometry, kind, 2, layout), want, strict=True):
        strides = (segment.row_stride, segment.element_stride)
        got = np.ndarray((segment.rows, segment.elements), rows.dtype, page, segment.offset, strides)
        assert np.array_equal(got, rows)


def test_vllm_is_not_imported_for_a_look_at_the_geometry():
    module = "pytest_kvconform.rigs.vllm_setup.kv_cache_specs"
    code = f"import sys, {module}; print(sorted({{'torch', 'vllm'}} & set(sys.modules)))"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert child.stdout == "[]\n"
