"""Real checkpoints of the nightly matrix, read from `nightly.toml`. Errors name the file and the key."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from model_matrix.families import load_families

FILE = Path(__file__).with_name("nightly.toml")
NIGHTLY = "nightly"  # name of the matrix


class NightlyError(ValueError):
    """Error: nightly.toml is wrong. The message names the file and the key."""


class RealDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Eagle3 draft with which P and D of a real checkpoint speculate."""

    repository: str  # "owner/name" on the Hugging Face hub
    revision: str  # a commit, tag or branch
    tokens: int  # that it drafts in a step


class RealCheckpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A real model that stands for a family in the nightly matrix."""

    repository: str  # "owner/name" on the Hugging Face hub
    revision: str  # a commit, tag or branch
    tensor_parallel: tuple[tuple[int, int], ...]  # of P and D; one cell for each pair
    dtype: Literal["bfloat16", "float16", "float32"]  # in which vLLM computes
    score: float | None = None  # published part of gsm8k's questions that are answered right
    score_source: str = ""  # who published it, and how the questions were asked
    # tokens of a prompt and its answer: five examples of gsm8k and a question have about 1000, and lm-eval
    # lets a model answer with 256
    max_model_len: int = 4096
    arguments: dict[str, Any] = {}  # further fields of vLLM's EngineArgs
    draft: RealDraft | None = None

    @property
    def topologies(self) -> tuple[str, ...]:
        """The topology of each cell, such as "P1D2". It needs a GPU for each rank."""
        return tuple(f"P{prefill}D{decode}" for prefill, decode in self.tensor_parallel)


@functools.cache
def load_real_checkpoints() -> dict[str, RealCheckpoint]:
    """Return all real checkpoints by family, in the order of the file. Raises NightlyError."""
    return read_real_checkpoints(FILE)


def read_real_checkpoints(path: Path) -> dict[str, RealCheckpoint]:
    """Read a file like `nightly.toml`. Raises NightlyError; OSError if it cannot be read."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=dict[str, RealCheckpoint])
    except msgspec.MsgspecError as error:
        raise NightlyError(f"{path.name}: {error}") from error
    for family, checkpoint in found.items():
        for mistake in _mistakes(family, checkpoint):
            raise NightlyError(f"{path.name}: {family}: {mistake}")
    return found


def _mistakes(family: str, checkpoint: RealCheckpoint) -> Iterator[str]:
    """Mistakes that the types do not exclude."""
    families = load_families()
    if family not in families:
        yield f"there is no such family; there are {', '.join(families)}"
        return
    models: list[RealCheckpoint | RealDraft] = [checkpoint, *([checkpoint.draft] if checkpoint.draft else [])]
    for one in models:
        if one.repository.count("/") != 1 or not all(one.repository.split("/")):
            yield f"repository is {one.repository!r}, and one looks like owner/name"
        if not one.revision:
            yield "revision must be a commit, a tag or a branch"
    sizes = [size for pair in checkpoint.tensor_parallel for size in pair]
    if not sizes or min(sizes) < 1:
        yield "tensor_parallel needs pairs of numbers above 0"
    if len(set(checkpoint.tensor_parallel)) < len(checkpoint.tensor_parallel):
        yield "tensor_parallel has a pair twice"
    if checkpoint.max_model_len < 1 or (checkpoint.draft and checkpoint.draft.tokens < 1):
        yield "max_model_len and draft.tokens must be above 0"
    if (checkpoint.score is None) != (not checkpoint.score_source):
        yield "score and score_source: there must be both or neither"
    if checkpoint.score is not None and not 0 < checkpoint.score <= 1:
        yield f"score is {checkpoint.score}, and must be a part of all questions"
    if (checkpoint.draft is None) != (families[family].draft is None):
        yield "draft: there must be one if the family speculates, and none otherwise"
