"""Family files are read strictly: every mistake is named by file and key."""

import re
import subprocess
import sys

import pytest

from model_matrix.families import FOLDER, FamilyError, checkpoint_tensors, load_families, read_family

ROOT = FOLDER.parents[1]


def test_all_are_there():
    assert list(load_families()) == [
        "gemma3",
        "gpt_oss",
        "kimi_k2_5_eagle3",
        "kimi_linear",
        "llama",
        "llama_mla_eagle3",
        "qwen3_5",
    ]
    assert load_families() is load_families()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "', 'titel = "', "unknown field `titel`"),
        ("version = 1\n", "", "missing required field `version`"),
        ("version = 1\n", 'version = "one"\n', r"\$.version"),
        ('dtype = "float32"', 'dtype = "float16"', r"float16.*\$.dtype"),
        ("shape = [512, 128], std", "shape = [512, 128], sdt", r"unknown field `sdt`.*\$.tensors"),
        ("shape = [512, 128], std", "shape = [], std", "model.embed_tokens.weight.* needs a shape"),
        ("shape = [512, 128], std", "shape = [512, 0], std", "model.embed_tokens.weight.* needs a shape"),
        ("std = 0.12", "std = -0.12", "q_proj.weight.* std that is not negative"),
        ("[tensors.each_layer]", "[tensors.every_layer]", r"tensors\.every_layer is neither"),
        ("model.layers.{i}.self_attn.q_proj", "model.layers.0.self_attn.q_proj", r"must contain \{i\}"),
        ('"lm_head.weight"', '"lm_head{i}.weight"', r"tensors\.once: .* must not contain"),
        ('id = "llama"', 'id = "lama"', "id is 'lama'"),
        ("sliding_window = 0", "sliding_window = 32", "config.sliding_window is None"),
        ("block_size = 32", "block_size = 0", "block_size must be above 0"),
        ("num_hidden_layers = 4", "hidden_layers = 4", "config.num_hidden_layers must be a number"),
        ("num_hidden_layers = 4", 'num_hidden_layers = 4\nlayer_types = ["a"]', "1 words for 4 layers"),
        ("[config]", "[config", "llama.toml: "),
    ],
)
def test_a_mistake_is_named(edited, old, new, message):
    with pytest.raises(FamilyError, match=f"^llama.toml: .*{message.removeprefix('llama.toml: ')}"):
        read_family(edited(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tokens = 3", "tokens = 0", "draft.tokens must be above 0"),
        ('method = "eagle3"', 'method = "eagle"', r"eagle.*\$.draft.method"),
        ("num_hidden_layers = 1", "hidden_layers = 1", "config.num_hidden_layers must be a number"),
        ('"fc.weight"', '"fc.{i}.weight"', r"tensors\.once: 'fc\.\{i\}\.weight' must not contain"),
    ],
)
def test_a_mistake_in_a_draft_is_named(edited, old, new, message):
    with pytest.raises(FamilyError, match=f"^kimi_k2_5_eagle3.toml: .*{message}"):
        read_family(edited(old, new, "kimi_k2_5_eagle3"))


def test_tables_go_to_their_layers_only():
    names = checkpoint_tensors(load_families()["qwen3_5"])
    kinds = (".mlp.", ".linear_attn.", ".self_attn.")
    assert [
        sorted({int(re.search(r"\d+", name)[0]) for name in names if kind in name}) for kind in kinds
    ] == [
        [0, 1, 2, 3],
        [0, 1, 2],
        [3],
    ]
    assert not [name for name in names if "{" in name]
    assert "lm_head.weight" in names


def test_kimi_linear_counts_its_layers_from_1():
    family = load_families()["kimi_linear"]
    assert family.kinds == ("linear_attention",) * 3 + ("latent_attention",)
    assert family.has_state
    assert family.convolution == 4
    assert "model.layers.3.self_attn.kv_b_proj.weight" in checkpoint_tensors(family)
    assert load_families()["llama"].kinds == ("full_attention",) * 4


USE = """
import sys, model_matrix as m
llama = m.load_families()["llama"]
m.ensure_checkpoint(llama, sys.argv[1]), m.expand("full"), m.prompt_lengths(llama, 32, "full")
{extra}
heavy = {{"torch", "vllm", "transformers", "pytest_kvconform", "reference_connector"}}
print("loaded:", sorted(heavy & set(sys.modules)))
"""


@pytest.mark.parametrize(("extra", "loaded"), [("", []), ("import pytest_kvconform", ["pytest_kvconform"])])
def test_nothing_heavy_is_loaded(tmp_path, extra, loaded):
    command = [sys.executable, "-c", USE.format(extra=extra), tmp_path]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert child.stdout == f"loaded: {loaded}\n"
