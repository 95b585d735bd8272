"""Geometry files are read strictly: layers must be as many as config.json says, and of its kinds."""

from collections import Counter
from pathlib import Path

import pytest

from model_matrix.geometries import (
    FOLDER,
    GeometryError,
    State,
    expand_layers,
    load_geometries,
    read_geometry,
)

# Layers by kind, as the models' papers and model cards give them.
LAYERS = {
    "deepseek_v3": {"mla": 61},
    "gemma3_1b": {"sliding_window": 22, "full_attention": 4},
    "gemma3_27b": {"sliding_window": 52, "full_attention": 10},
    "gemma3_4b": {"sliding_window": 29, "full_attention": 5},
    "gpt_oss_120b": {"sliding_window": 18, "full_attention": 18},
    "gpt_oss_20b": {"sliding_window": 12, "full_attention": 12},
    "kimi_k2_5_eagle3": {"mla": 61, "full_attention": 1},
    "kimi_linear_48b": {"state": 20, "mla": 7},
    "llama3_1_8b": {"full_attention": 32},
    "qwen3_5_27b": {"state": 48, "full_attention": 16},
    "qwen3_5_35b_a3b": {"state": 30, "full_attention": 10},
}


def test_all_are_there():
    assert list(load_geometries()) == list(LAYERS)
    assert load_geometries() is load_geometries()


@pytest.mark.parametrize("geometry", load_geometries().values(), ids=lambda geometry: geometry.id)
def test_layers(geometry):
    layers = expand_layers(geometry)
    assert Counter(layer.kind.__struct_config__.tag for layer in layers) == LAYERS[geometry.id]
    assert [layer.number for layer in layers] == list(range(len(layers)))
    assert len({layer.name for layer in layers}) == len(layers)
    assert all(f".{layer.number}." in layer.name for layer in layers)


def test_only_a_draft_is_marked_as_draft():
    drafts = {
        geometry.id: [layer.name for layer in expand_layers(geometry) if layer.draft]
        for geometry in load_geometries().values()
    }
    assert {name: layers for name, layers in drafts.items() if layers} == {
        "kimi_k2_5_eagle3": ["model.layers.61.self_attn.attn"]
    }


def test_kinds_lie_where_the_config_says():
    kimi = load_geometries()["kimi_linear_48b"]
    states = [layer.number + 1 for layer in expand_layers(kimi) if isinstance(layer.kind, State)]
    assert states == kimi.config["linear_attn_config"]["kda_layers"]
    gemma = expand_layers(load_geometries()["gemma3_4b"])
    assert [layer.number for layer in gemma if layer.word == "full"] == [5, 11, 17, 23, 29]


def test_channels_of_a_state():
    states = {
        name: kind
        for name, g in load_geometries().items()
        for kind in g.kinds.values()
        if isinstance(kind, State)
    }
    assert {name: kind.conv_channels for name, kind in states.items()} == {
        "kimi_linear_48b": (4096, 4096, 4096),
        "qwen3_5_27b": (2048, 2048, 6144),
        "qwen3_5_35b_a3b": (2048, 2048, 4096),
    }


@pytest.fixture
def edited(tmp_path: Path):
    """edited(name, old, new): path of a copy of a geometry file with one of its texts replaced."""

    def edit(name: str, old: str, new: str) -> Path:
        text = (FOLDER / f"{name}.toml").read_text()
        assert old in text
        (tmp_path / f"{name}.toml").write_text(text.replace(old, new))
        return tmp_path / f"{name}.toml"

    return edit


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("gemma3_1b", 'title = "', 'titel = "', "unknown field `titel`"),
        ("gemma3_1b", 'dtype = "bfloat16"\nlayers', 'dtype = "fp4"\nlayers', r"fp4.*\$\.dtype"),
        ("gemma3_1b", 'source = "', '# source = "', "missing required field `source`"),
        (
            "gemma3_1b",
            "window = 512\n\n[kinds.full]",
            "windows = 512\n\n[kinds.full]",
            r"unknown field `windows`.*\$\.kinds",
        ),
        ("gemma3_1b", 'type = "sliding_window"', 'type = "chunked"', r"chunked.*\$\.kinds"),
        (
            "gemma3_1b",
            "kv_heads = 1\nhead_size = 256\nwindow",
            "kv_heads = 0\nhead_size = 256\nwindow",
            r"kinds\.window: kv_heads is 0",
        ),
        (
            "gemma3_1b",
            'name = "model.layers.{i}.',
            'name = "model.layers.1.',
            r"kinds\.window: name .* must contain \{i\}",
        ),
        ("gemma3_1b", 'id = "gemma3_1b"', 'id = "gemma"', "id is 'gemma'"),
        ("gemma3_1b", "{ times = 2,", "{ times = 0,", "layers: times must be above 0"),
        ("gemma3_1b", "{ times = 2,", "{ times = 3,", r"config\.num_hidden_layers is 26, but there are 27"),
        (
            "gemma3_1b",
            '2, kinds = ["window"]',
            '2, kinds = ["widow"]',
            "layers: 'widow' is not a key of kinds",
        ),
        (
            "gemma3_1b",
            "num_key_value_heads = 1",
            "num_key_value_heads = 2",
            r"config\.num_key_value_heads is 2, .* has 1",
        ),
        (
            "gemma3_1b",
            "\nsliding_window = 512",
            "\nsliding_window = 1024",
            r"config\.sliding_window is 1024, .* has 512",
        ),
        ("gemma3_1b", "num_attention_heads = 4\n", "", r"config\.num_attention_heads is missing"),
        ("gemma3_1b", "head_dim = 256", "head_dim = 128", r"config\.head_dim is 128, .* has 256"),
        (
            "llama3_1_8b",
            "hidden_size = 4096",
            "hidden_size = 2048",
            r"config\.hidden_size is 2048, .* has 4096",
        ),
        (
            "llama3_1_8b",
            "[config]",
            '[kinds.other]\ntype = "mla"\nname = "{i}"\nkv_lora_rank = 1\nrope_head_size = 1\n[config]',
            "of no layer",
        ),
        (
            "llama3_1_8b",
            "[config]",
            "[draft_config]\na = 1\n[config]",
            "draft_layers, draft_config and speculation: there must be all or none",
        ),
        (
            "deepseek_v3",
            "\nkv_lora_rank = 512\nqk",
            "\nkv_lora_rank = 256\nqk",
            r"config\.kv_lora_rank is 256, .* has 512",
        ),
        (
            "qwen3_5_27b",
            "value_heads = 48\nhead_v",
            "value_heads = 32\nhead_v",
            r"config\.linear_num_value_heads is 48, .* has 32",
        ),
        (
            "kimi_linear_48b",
            "short_conv_kernel_size = 4",
            "short_conv_kernel_size = 3",
            r"config\.linear_attn_config is",
        ),
        (
            "kimi_linear_48b",
            "key_heads = 32",
            "key_heads = 16",
            r"kinds\.state: kda has the same heads for keys and values",
        ),
        (
            "kimi_k2_5_eagle3",
            "kv_heads = 64",
            "kv_heads = 8",
            r"draft_config\.num_key_value_heads is 64, .* has 8",
        ),
        ("llama3_1_8b", "[config]", "[config", "llama3_1_8b.toml: "),
    ],
)
def test_a_mistake_is_named(edited, name, old, new, message):
    file = f"{name}.toml: "
    with pytest.raises(GeometryError, match=f"^{file}.*{message.removeprefix(file)}"):
        read_geometry(edited(name, old, new))
