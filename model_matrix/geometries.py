"""Geometries: the layers that have KV in real models, read from `geometries/*.toml`.

Errors name the file and the key.

A geometry holds what decides where KV lies: the kinds of layers in order, KV heads, head sizes, windows,
sizes of states. It holds no weights. `config` is the part of config.json that vLLM's ModelConfig needs; the
loader checks that both agree.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

FOLDER = Path(__file__).with_name("geometries")


class GeometryError(ValueError):
    """Error: a geometry file is wrong. The message names the file and the key."""


class FullAttention(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="full_attention"
):
    """Attention over all tokens. A row is one token's K or V of one head: `head_size` elements."""

    name: str  # of the layer in vLLM; {i} is its number in the whole model, with the draft
    kv_heads: int  # in the whole model, before tensor parallelism
    head_size: int  # elements


class SlidingWindow(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="sliding_window"
):
    """Attention over the last `window` tokens, the current one included."""

    name: str
    kv_heads: int
    head_size: int
    window: int  # tokens


class Mla(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="mla"):
    """Latent attention: one row per token instead of K and V heads, the same on every TP rank."""

    name: str
    kv_lora_rank: int  # elements of the compressed K and V
    rope_head_size: int  # elements of the rotary part, which follows

    @property
    def head_size(self) -> int:
        """Elements of one row."""
        return self.kv_lora_rank + self.rope_head_size


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="state"):
    """A state of fixed size: inputs of a convolution, and one matrix per value head.

    The inputs are those of the last `kernel` - 1 tokens, over Q, K and V.

    Q and K have `key_heads` heads of `head_k` channels each, V has `value_heads` of `head_v`; the matrix is
    `head_v` x `head_k`.
    """

    name: str
    mechanism: Literal["gdn", "kda"]  # Gated DeltaNet; Kimi Delta Attention
    key_heads: int
    head_k: int
    value_heads: int
    head_v: int
    kernel: int
    conv_dtype: Literal["bfloat16", "float32"]
    ssm_dtype: Literal["bfloat16", "float32"]

    @property
    def conv_channels(self) -> tuple[int, int, int]:
        """Channels of Q, K and V in the whole model."""
        return self.key_heads * self.head_k, self.key_heads * self.head_k, self.value_heads * self.head_v


Attention: TypeAlias = FullAttention | SlidingWindow | Mla
Kind: TypeAlias = Attention | State


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive layers: the words of `kinds`, repeated `times` times."""

    times: int
    kinds: tuple[str, ...]


class Layer(msgspec.Struct, frozen=True):
    """One layer that has KV."""

    name: str  # in vLLM
    number: int  # in the whole model; the draft's layers follow the model's own
    word: str  # key of Geometry.kinds
    kind: Kind
    draft: bool  # belongs to the draft model of speculative decoding


class Geometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One real model, described by the layers of its KV cache."""

    id: str  # "gemma3_1b"; also the name of its file
    title: str
    family: str  # of its architecture: "gemma3"
    # of the numbers: repository and file on the hub, model file of vLLM, and what is not confirmed
    source: str
    dtype: Literal["bfloat16", "float16", "float32"]  # of the model, and of its KV by default
    kinds: dict[str, Kind]
    layers: tuple[Run, ...]
    draft_layers: tuple[Run, ...] = ()
    config: dict[str, Any]  # config.json
    draft_config: dict[str, Any] | None = None  # config.json of the draft model
    # fields of vLLM's SpeculativeConfig for the draft, beside its model: {"method", "num_speculative_tokens"}
    speculation: dict[str, Any] | None = None

    @property
    def architectures(self) -> set[str]:
        """Names of the model classes of vLLM: of the model and of its draft."""
        configs = filter(None, (self.config, self.draft_config))
        return {name for config in configs for name in config["architectures"]}


@functools.cache
def load_geometries() -> dict[str, Geometry]:
    """Return all geometries by id, sorted. Raises GeometryError if a file is wrong."""
    return {path.stem: read_geometry(path) for path in sorted(FOLDER.glob("*.toml"))}


def read_geometry(path: Path) -> Geometry:
    """Read one geometry file.

    Raises GeometryError naming the file and the key; OSError if it cannot be read.
    """
    try:
        geometry = msgspec.toml.decode(path.read_bytes(), type=Geometry)
    except msgspec.MsgspecError as error:
        raise GeometryError(f"{path.name}: {error}") from error
    if mistake := _mistake(geometry, path.stem):
        raise GeometryError(f"{path.name}: {mistake}")
    return geometry


def expand_layers(geometry: Geometry) -> list[Layer]:
    """Return every layer that has KV: in the order of the model, then those of the draft."""
    own, draft = _words(geometry.layers), _words(geometry.draft_layers)
    return [
        Layer(
            geometry.kinds[word].name.replace("{i}", str(i)),
            i,
            word,
            geometry.kinds[word],
            draft=i >= len(own),
        )
        for i, word in enumerate(own + draft)
    ]


def _words(runs: tuple[Run, ...]) -> list[str]:
    return [word for run in runs for word in run.kinds * run.times]


def _mistake(geometry: Geometry, stem: str) -> str:
    """Return a mistake in a geometry file that its types do not exclude; "" if there is none."""
    if geometry.id != stem:
        return f"id is {geometry.id!r}, but the file is {stem}.toml"
    for table in ("layers", "draft_layers"):
        for run in getattr(geometry, table):
            if run.times < 1 or not run.kinds:
                return f"{table}: times must be above 0 and kinds not empty"
            for word in run.kinds:
                if word not in geometry.kinds:
                    return f"{table}: {word!r} is not a key of kinds"
    own, draft = _words(geometry.layers), _words(geometry.draft_layers)
    for word, kind in geometry.kinds.items():
        if word not in own + draft:
            return f"kinds.{word} is the kind of no layer"
        if "{i}" not in kind.name:
            return f"kinds.{word}: name {kind.name!r} must contain {{i}}"
        if (
            isinstance(kind, State)
            and kind.mechanism == "kda"
            and (kind.key_heads, kind.head_k) != (kind.value_heads, kind.head_v)
        ):
            return f"kinds.{word}: kda has the same heads for keys and values"
        numbers = {
            key: value for key, value in msgspec.structs.asdict(kind).items() if isinstance(value, int)
        }
        for key, value in numbers.items():
            if value < 1:
                return f"kinds.{word}: {key} is {value}, but must be above 0"
    if not bool(draft) == (geometry.draft_config is not None) == (geometry.speculation is not None):
        return "draft_layers, draft_config and speculation: there must be all or none"
    return _config_mistake("config", geometry.config, [geometry.kinds[word] for word in own]) or (
        _config_mistake("draft_config", geometry.draft_config, [geometry.kinds[word] for word in draft])
        if geometry.draft_config
        else ""
    )


def _config_mistake(table: str, config: dict[str, Any], kinds: list[Kind]) -> str:
    """Return how config.json contradicts the kinds of its layers; "" if it does not."""
    for key in ("architectures", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        if key not in config:
            return f"{table}.{key} is missing"
    if config["num_hidden_layers"] != len(kinds):
        return (
            f"{table}.num_hidden_layers is {config['num_hidden_layers']}, but there are {len(kinds)} layers"
        )
    for kind in kinds:
        for key, value in _implied_config(kind, config).items():
            if config.get(key) != value:
                return (
                    f"{table}.{key} is {config.get(key)}, but a layer of type "
                    f"{kind.__struct_config__.tag} has {value}"
                )
    return ""


def _implied_config(kind: Kind, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys and values of config.json that a kind implies."""
    if isinstance(kind, Mla):
        return {"kv_lora_rank": kind.kv_lora_rank, "qk_rope_head_dim": kind.rope_head_size}
    if isinstance(kind, State):
        if kind.mechanism == "kda":
            implied = {
                "num_heads": kind.value_heads,
                "head_dim": kind.head_v,
                "short_conv_kernel_size": kind.kernel,
            }
            return {"linear_attn_config": {**config.get("linear_attn_config", {}), **implied}}
        return {
            "linear_num_key_heads": kind.key_heads,
            "linear_key_head_dim": kind.head_k,
            "linear_num_value_heads": kind.value_heads,
            "linear_value_head_dim": kind.head_v,
            "linear_conv_kernel_dim": kind.kernel,
            "mamba_ssm_dtype": kind.ssm_dtype,
        }
    implied = {"num_key_value_heads": kind.kv_heads}
    if "head_dim" in config:
        implied["head_dim"] = kind.head_size
    elif config.get("hidden_size") != kind.head_size * config["num_attention_heads"]:
        implied["hidden_size"] = kind.head_size * config["num_attention_heads"]
    if isinstance(kind, SlidingWindow):
        implied["sliding_window"] = kind.window
    return implied
