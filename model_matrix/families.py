"""Families: the tiny models, read from `families/*.toml`. Errors name the file and the key."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import msgspec

FOLDER = Path(__file__).with_name("families")


class FamilyError(ValueError):
    """Error: a family file is wrong. The message names the file and the key."""


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a checkpoint: its shape, and the normal distribution of its values.

    With std 0 all values are `mean`.
    """

    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = 0.0


class Draft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The draft model with which P and D of a family speculate."""

    method: Literal["eagle3"]  # vLLM's word
    tokens: int  # that it drafts in a step
    config: dict[str, Any]  # config.json, verbatim
    tensors: dict[str, dict[str, Tensor]]  # see Family

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer, see `_kinds`."""
        return _kinds(self.config)


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of KV cache, as a model that is small enough to run anywhere."""

    id: str  # "gemma3"; also the name of its file
    title: str
    source: str  # where the architecture comes from: class of transformers; model file of vLLM
    version: int  # raised with every change
    changelog: str  # one line: what the last change was
    dtype: Literal["float32", "bfloat16"]  # in which engines compute; the checkpoint is always bfloat16
    # tokens per block, the engine option; so large that vLLM does not raise it at any topology
    block_size: int
    sliding_window: int  # tokens; 0: no layer has one
    config: dict[str, Any]  # config.json, verbatim
    # "once", "each_layer" or a word of `kinds` -> name with {i} -> tensor
    tensors: dict[str, dict[str, Tensor]]
    draft: Draft | None = None

    @property
    def models(self) -> tuple[Family | Draft, ...]:
        """The family's own model, and the draft if there is one."""
        return (self, self.draft) if self.draft else (self,)

    @property
    def architectures(self) -> set[str]:
        """vLLM's names of the classes of these models."""
        return {name for model in self.models for name in model.config["architectures"]}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer of the model, without its draft, see `_kinds`."""
        return _kinds(self.config)

    @property
    def has_state(self) -> bool:
        """Whether a layer keeps a recurrent state. Such a model is slow to prefill on a CPU."""
        return "linear_attention" in self.kinds

    @property
    def convolution(self) -> int:
        """Tokens that the convolution before a recurrent state spans; 0: there is none."""
        linear = self.config.get("linear_attn_config", {})
        width: int = linear.get("short_conv_kernel_size") or self.config.get("linear_conv_kernel_dim", 0)
        return width


@functools.cache
def load_families() -> dict[str, Family]:
    """Return all families by id, sorted. Raises FamilyError if a file is wrong."""
    return {path.stem: read_family(path) for path in sorted(FOLDER.glob("*.toml"))}


def read_family(path: Path) -> Family:
    """Read one family file. Raises FamilyError naming the file and the key; OSError if it cannot be read."""
    try:
        family = msgspec.toml.decode(path.read_bytes(), type=Family)
    except msgspec.MsgspecError as error:
        raise FamilyError(f"{path.name}: {error}") from error
    if mistake := _mistake(family, path.stem):
        raise FamilyError(f"{path.name}: {mistake}")
    return family


def checkpoint_tensors(model: Family | Draft) -> dict[str, Tensor]:
    """Return every tensor of the checkpoint of one model by its full name, sorted.

    `{i}` becomes each layer of the table.
    """
    tensors = {}
    for table, entries in model.tensors.items():
        for i in [None] if table == "once" else _layers(model, table):
            tensors.update({name.replace("{i}", str(i)): tensor for name, tensor in entries.items()})
    return dict(sorted(tensors.items()))


def _layers(model: Family | Draft, table: str) -> list[int]:
    """Return the numbers of the layers of a table of tensors."""
    kinds = model.kinds
    return [i for i in range(len(kinds)) if table == "each_layer" or kinds[i] == table]


def _kinds(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer: a word of transformers' `layer_types`, or "latent_attention"."""
    layers = range(config["num_hidden_layers"])
    attention = "latent_attention" if config.get("kv_lora_rank") else "full_attention"
    if linear := config.get("linear_attn_config"):  # which counts layers from 1
        return tuple("linear_attention" if i + 1 in linear["kda_layers"] else attention for i in layers)
    return tuple(config.get("layer_types") or [attention] * len(layers))


def _mistake(family: Family, stem: str) -> str:
    """Return a mistake in a family file that its types do not exclude; "" if there is none."""
    config = family.config
    if family.id != stem:
        return f"id is {family.id!r}, but the file is {stem}.toml"
    if (config.get("sliding_window") or 0) != family.sliding_window:
        return (
            f"sliding_window is {family.sliding_window}, but config.sliding_window is "
            f"{config.get('sliding_window')}"
        )
    if family.block_size < 1:
        return "block_size must be above 0"
    if family.draft and family.draft.tokens < 1:
        return "draft.tokens must be above 0"
    return next(filter(None, map(_mistake_of_model, family.models)), "")


def _mistake_of_model(model: Family | Draft) -> str:
    """Return a mistake in the configuration or the tensors of one model; "" if there is none."""
    config = model.config
    if not isinstance(config.get("num_hidden_layers"), int):
        return "config.num_hidden_layers must be a number"
    kinds = model.kinds
    if len(kinds) != config["num_hidden_layers"]:
        return f"config.layer_types has {len(kinds)} words for {config['num_hidden_layers']} layers"
    for table, entries in model.tensors.items():
        if table not in ("once", "each_layer", *kinds):
            return f"tensors.{table} is neither once, each_layer nor a word of config.layer_types"
        for name, tensor in entries.items():
            if ("{i}" in name) == (table == "once"):
                return f"tensors.{table}: {name!r} must {'not ' if table == 'once' else ''}contain {{i}}"
            if not tensor.shape or min(tensor.shape) < 1 or tensor.std < 0:
                return (
                    f"tensors.{table}: {name!r} needs a shape of numbers above 0, and a std that is not "
                    "negative"
                )
    return ""
