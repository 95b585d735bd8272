"""From what connectors were handed to the engines that vLLM builds of the same models, and what differs."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from model_matrix import load_families, load_geometries
from model_matrix.geometries import Geometry, Mla, State
from model_matrix.variants import few_layers, speculating
from pytest_kvconform.rigs.vllm_setup import DIFFERENCES
from pytest_kvconform.rigs.vllm_setup.engine_config import DRAFT

ROOT = Path(__file__).parents[2]
BUILD_S = 400.0
OWN = {"engine_id": "engine", "kv_port": 1}  # what each engine has of its own
BLOCK = 16  # tokens: what setups of models with states ask for, and the least of a kernel
MLA64 = 64  # tokens of the kernel in the setup of models with latent attention and states
# by frames of the process that builds the connector: the first that is found names the rig
RIGS = {
    "rigs/scheduler/store_engine": "engine with a worker half",
    "rigs/scheduler/worker_half": "worker half",
    "rigs/scheduler/": "scheduler half",
    "rigs/bytes/faulty/": "peers",
    "rigs/bytes/": "bytes",
    "rigs/serving/": "serving",
    "rigs/engine/": "engine",
}


@dataclass(frozen=True)
class Difference:
    """One field in which what a connector is handed differs."""

    path: str
    rig: str
    model: str
    half: str  # "SCHEDULER" or "WORKER"
    expected: str  # what vLLM hands over; "-": nothing
    found: str

    def __str__(self) -> str:
        return f"{self.rig}, {self.model}, {self.half}: {self.path}: {self.expected} -> {self.found}"


class Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An argument of EngineArgs that a rig gives beside the model and the cell. `field`: where it stands."""

    field: str
    why: str


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields that differ for a reason. `paths`: patterns, as fnmatch has them. `rigs`: empty: all."""

    paths: tuple[str, ...]
    why: str
    rigs: tuple[str, ...] = ()

    def excuses(self, one: Difference) -> bool:
        """Whether this is the reason for a difference."""
        of_rig = not self.rigs or one.rig in self.rigs
        return of_rig and any(fnmatch.fnmatchcase(one.path, pattern) for pattern in self.paths)


class Differences(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole list."""

    arguments: dict[str, Argument]
    fields: tuple[Field, ...]


def load_differences() -> Differences:
    """Read the list."""
    return msgspec.toml.decode(DIFFERENCES.read_bytes(), type=Differences)


class Handed(msgspec.Struct, frozen=True, dict=True):
    """What one half of a connector was handed, as recorder.py writes it."""

    half: str
    built_by: tuple[str, ...]
    environment: dict[str, str]
    config: dict[str, str]
    kv_cache_config: dict[str, str]

    @cached_property
    def rig(self) -> str:
        """Which rig has built it."""
        return next(rig for room, rig in RIGS.items() if any(room in frame for frame in self.built_by))

    @cached_property
    def fields(self) -> dict[str, str]:
        """Path -> repr, of both records. Addresses of objects and folders of models are left out."""
        both = self.config | {
            f"kv_cache_config.{path}": value for path, value in self.kv_cache_config.items()
        }
        return {path: _plain(value) for path, value in both.items()}

    def value(self, path: str) -> Any:
        """What the VllmConfig has there."""
        return ast.literal_eval(self.config[path])

    def record(self, path: str) -> dict[str, Any]:
        """The fields of one record within the configuration, with those of its dicts."""
        found: dict[str, Any] = {}
        for key in (key for key in self.config if key.startswith(f"{path}.")):
            outer, _, inner = key.removeprefix(f"{path}.").partition("[")
            if inner:
                found.setdefault(outer, {})[inner.rstrip("]")] = self.value(key)
            else:
                found[outer] = self.value(key)
        return found

    @property
    def model(self) -> Path:
        """The folder of the model."""
        return Path(self.value("model_config.model"))

    @property
    def speculation(self) -> dict[str, Any]:
        """How the engine speculates; empty: not at all."""
        path = "speculative_config."
        fields = ("method", "num_speculative_tokens", "attention_backend")
        return {name: self.value(path + name) for name in fields} if f"{path}method" in self.config else {}

    @property
    def first_rank(self) -> bool:
        """Whether it is that of the first rank. Others differ by their numbers."""
        return self.value("parallel_config.rank") == 0

    @property
    def differs_on_purpose(self) -> bool:
        """Whether it is an engine with another model, whose KV a connector has to refuse."""
        return "/" in self.model.name or self.model.name in ("geometry-another", "another-model")


def read(folder: Path) -> list[Handed]:
    """Everything that connectors have written down."""
    return [msgspec.json.decode(path.read_bytes(), type=Handed) for path in sorted(folder.glob("*.json"))]


def engine_of(handed: Handed, place: Path) -> dict[str, Any]:
    """The engine that vLLM has to build, as expected.py reads it. `place`: for folders of models."""
    model = handed.model
    if geometry := _geometry_of(handed):
        model, architectures = _folder_of(geometry, place), geometry.architectures
        mla, states = (any(isinstance(one, kind) for one in geometry.kinds.values()) for kind in (Mla, State))
        # vLLM has raised the blocks of models with states
        block = BLOCK if states else handed.value("cache_config.block_size")
        kernel = {"kernel": MLA64, "any_multiple": False} if mla and states else {"kernel": BLOCK}
    else:
        family = load_families()[model.name.rpartition("-")[0]]
        architectures, block, kernel = family.architectures, family.block_size, {}
    arguments = {name: handed.value(one.field) for name, one in load_differences().arguments.items()}
    arguments |= {
        "block_size": block,
        "tensor_parallel_size": handed.value("parallel_config.tensor_parallel_size"),
        "kv_cache_dtype": handed.value("cache_config.cache_dtype"),
        "enable_prefix_caching": handed.value("cache_config.enable_prefix_caching"),
        "disable_hybrid_kv_cache_manager": handed.value("scheduler_config.disable_hybrid_kv_cache_manager"),
        "dtype": handed.config["model_config.dtype"].removeprefix("torch."),
        "kv_transfer_config": handed.record("kv_transfer_config") | OWN,
    }
    if speculation := handed.speculation:
        with_draft = geometry is None or geometry.draft_config
        arguments["speculative_config"] = speculation | ({"model": str(model / DRAFT)} if with_draft else {})
    return {
        "model": str(model),
        "architectures": sorted(architectures),
        "arguments": arguments,
        "environment": handed.environment,
        "stand_in": kernel,
    }


def build(engines: list[dict[str, Any]], place: Path) -> list[dict[str, Handed]]:
    """Let vLLM build engines. Returns for each what the halves of its connector were handed."""
    (place / "engines.json").write_text(json.dumps(engines))
    child = subprocess.run(
        [sys.executable, "-m", "tests.configurations.expected", str(place)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return [{one.half: one for one in read(place / str(number))} for number in range(len(engines))]


def differing(ours: Handed, theirs: Handed) -> list[Difference]:
    """The fields in which they differ."""
    left, right = theirs.fields, ours.fields
    return [
        Difference(path, ours.rig, ours.model.name, ours.half, left.get(path, "-"), right.get(path, "-"))
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)
    ]


def _geometry_of(handed: Handed) -> Geometry | None:
    """The geometry of an engine without a model; None: it has a checkpoint."""
    name = handed.model.name.removeprefix("geometry-")
    geometry = load_geometries().get(name.removesuffix("-few"))
    if geometry is None or geometry.id == name:
        return geometry
    few, speculation = few_layers(geometry), handed.speculation
    return (
        speculating(few, speculation["method"], speculation["num_speculative_tokens"]) if speculation else few
    )


def _folder_of(geometry: Geometry, place: Path) -> Path:
    """A folder with the model's config.json, and the draft's, of the name that the rig's has."""
    folder = place / f"geometry-{geometry.id}"
    for where, config in ((folder, geometry.config), (folder / DRAFT, geometry.draft_config)):
        if config is not None:
            where.mkdir(exist_ok=True)
            (where / "config.json").write_text(json.dumps(config))
    return folder


def _plain(value: str) -> str:
    return re.sub(r"'[^']*/(geometry-)", r"'\1", re.sub(r" at 0x[0-9a-f]+", "", value))
