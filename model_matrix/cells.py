"""From the matrix to cells: which models run at which topologies on each rig.

The lists are in one file for each rig: `engine.toml`, `bytes.toml`, `peers.toml`, `scheduler.toml`, and
`accuracy.toml` of the rig "serving". The cells of the nightly matrix are those of `nightly.toml`.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from model_matrix.families import load_families
from model_matrix.geometries import load_geometries
from model_matrix.nightly import NIGHTLY, load_real_checkpoints

MATRICES = ("quick", "full")  # of the files of the rigs
EVERY_MATRIX = (*MATRICES, NIGHTLY)
RIGS = ("engine", "bytes", "scheduler", "peers", "serving")
MODELS = ("engine", "serving")  # rigs whose cells are families, with checkpoints; of the others geometries
# tier of the suite -> rigs of its cases
RIGS_OF_TIERS = {
    "interface": ("scheduler",),
    "protocol": ("scheduler", "peers"),
    "bytes": ("bytes",),
    "engine": ("engine",),
    "accuracy": ("serving",),
}
FILES = {"serving": "accuracy"}  # names of matrix files that are not those of their rigs


class MatrixError(ValueError):
    """A matrix file is wrong. The message names the file and the key."""


class UnknownName(ValueError):
    """A word that names no matrix, family or topology.

    The message has the nearest valid word and all of them.
    """


class Place(NamedTuple):
    """One cell of a matrix."""

    family: str  # of the rigs of MODELS a family id, of the others a geometry id
    topology: str
    setup: str = ""  # a word of bytes.toml; "" for the rigs of MODELS
    rig: str = "engine"  # one of RIGS


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How memory is laid out on one side, and how the side schedules."""

    block: int = 16  # tokens
    layout: str = ""
    dtype: str = "auto"
    content: Literal["backend", "packed"] = "packed"
    conv: Literal["DS", "SD"] = "DS"
    prefix_caching: bool = True
    kernel: int = 0  # tokens of a kernel's block, content "packed" only; 0: any multiple of 16
    in_flight: bool = False  # asynchronous scheduling: a step is in flight while the next is scheduled
    hma: bool = True  # whether vLLM may use its hybrid memory allocator


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How memory is laid out on both sides, and whether they are forks of one zygote."""

    prefill: Side = Side()
    decode: Side = Side()
    zygotes: Literal[1, 2] = 1  # from which P and D are forked


class EngineMatrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`engine.toml`. Each matrix: family id -> topologies."""

    quick: dict[str, list[str]]
    full: dict[str, list[str]]


class AccuracyMatrices(EngineMatrices, frozen=True, forbid_unknown_fields=True):
    """`accuracy.toml`: family id -> topologies, and how many questions are asked."""

    questions: dict[str, int]  # by matrix: how many are asked at a time


class SetupMatrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`scheduler.toml` or `peers.toml`. Each matrix: geometry id -> setup of bytes.toml -> topologies."""

    quick: dict[str, dict[str, list[str]]]
    full: dict[str, dict[str, list[str]]]


class ByteMatrices(SetupMatrices, frozen=True, forbid_unknown_fields=True):
    """`bytes.toml`: setups, and the matrices of the byte rig."""

    setups: dict[str, Setup]


Matrices = TypeVar("Matrices", EngineMatrices, AccuracyMatrices, SetupMatrices, ByteMatrices)


def expand(matrix: str, families: Sequence[str] = (), topologies: Sequence[str] = ()) -> list[Place]:
    """Cells of a matrix, those of the engine rig first, in the order of the files.

    Empty selections choose everything.

    A family selects its geometries, too; a geometry can be selected by its own id. Two valid selections can
    have no cell in common: then the list is empty. Raises UnknownName.
    """
    _know("matrix", matrix, EVERY_MATRIX)
    chosen = _places(matrix)
    words = {
        place: {
            place.family,
            *([load_geometries()[place.family].family] if place.rig not in MODELS else []),
        }
        for place in chosen
    }
    for family in families:
        _know(
            f"family in the {matrix} matrix",
            family,
            dict.fromkeys(word for place in chosen for word in sorted(words[place])),
        )
    for topology in topologies:
        parse_topology(topology)
        elsewhere = [name for name in EVERY_MATRIX if topology in _topologies(_places(name))]
        if matrix not in elsewhere and elsewhere:
            raise UnknownName(
                f"topology {topology!r} is not in the {matrix} matrix, but in: {', '.join(elsewhere)}"
            )
        _know(f"topology in the {matrix} matrix", topology, _topologies(chosen))
    return [
        place
        for place in chosen
        if (not families or words[place] & set(families)) and (not topologies or place.topology in topologies)
    ]


def _places(matrix: str) -> list[Place]:
    """Every cell of one matrix."""
    if matrix == NIGHTLY:
        real = load_real_checkpoints()
        return [Place(family, word, rig="serving") for family in real for word in real[family].topologies]
    places: list[Place] = []
    for rig, matrices in (("engine", load_engine_matrices()), ("serving", load_accuracy_matrices())):
        models: dict[str, list[str]] = getattr(matrices, matrix)
        places += [Place(family, topology, rig=rig) for family, row in models.items() for topology in row]
    for rig in (rig for rig in RIGS if rig not in MODELS):
        rows: dict[str, dict[str, list[str]]] = getattr(load_setup_matrices(rig), matrix)
        places += [
            Place(geometry, topology, setup, rig)
            for geometry, setups in rows.items()
            for setup, row in setups.items()
            for topology in row
        ]
    return places


def parse_topology(topology: str) -> tuple[int, int]:
    """Tensor parallel sizes of prefill and decode: "P1D2" -> (1, 2). Raises UnknownName."""
    if match := re.fullmatch(r"P([1-9][0-9]*)D([1-9][0-9]*)", topology, re.ASCII):
        return int(match[1]), int(match[2])
    near = (
        f" (did you mean {topology.upper()}?)"
        if re.fullmatch(r"p[1-9]\d*d[1-9]\d*", topology, re.I | re.A)
        else ""
    )
    raise UnknownName(
        f"{topology!r} is no topology{near}; one looks like P1D2: tensor parallel size of prefill and decode"
    )


def _topologies(places: Iterable[Place]) -> list[str]:
    return sorted({place.topology for place in places})


def matrix_file(rig: str) -> Path:
    """The matrix file of a rig."""
    return Path(__file__).with_name(f"{FILES.get(rig, rig)}.toml")


@functools.cache
def load_engine_matrices() -> EngineMatrices:
    """The matrices of `engine.toml`. Raises MatrixError."""
    return read_matrices(matrix_file("engine"), EngineMatrices)


@functools.cache
def load_accuracy_matrices() -> AccuracyMatrices:
    """The matrices of `accuracy.toml`, and how many questions are asked. Raises MatrixError."""
    return read_matrices(matrix_file("serving"), AccuracyMatrices)


@functools.cache
def load_byte_matrices() -> ByteMatrices:
    """The setups and matrices of `bytes.toml`. Raises MatrixError."""
    return read_matrices(matrix_file("bytes"), ByteMatrices)


@functools.cache
def load_setup_matrices(rig: str) -> SetupMatrices:
    """The matrices of a rig whose cells are geometries. Raises MatrixError."""
    return load_byte_matrices() if rig == "bytes" else read_matrices(matrix_file(rig), SetupMatrices)


def read_matrices(path: Path, kind: type[Matrices]) -> Matrices:
    """Read a matrix file. Raises MatrixError naming the file and the key; OSError if it cannot be read."""
    try:
        matrices = msgspec.toml.decode(path.read_bytes(), type=kind)
        if isinstance(matrices, EngineMatrices):
            _check_families(matrices)
        else:
            known = matrices.setups if isinstance(matrices, ByteMatrices) else load_byte_matrices().setups
            _check_geometries(matrices, known)
    except (msgspec.MsgspecError, UnknownName) as error:
        raise MatrixError(f"{path.name}: {error}") from error
    return matrices


def _check_families(matrices: EngineMatrices) -> None:
    """Raise UnknownName unless families and topologies are known."""
    for name in MATRICES:
        for family, row in getattr(matrices, name).items():
            _know(f"family for {name}.{family}", family, load_families())
            for topology in row:
                parse_topology(topology)


def _check_geometries(matrices: SetupMatrices, known: dict[str, Setup]) -> None:
    """Raise UnknownName unless geometries, setups and topologies are known."""
    for name in MATRICES:
        for geometry, setups in getattr(matrices, name).items():
            _know(f"geometry for {name}.{geometry}", geometry, load_geometries())
            for setup, row in setups.items():
                _know(f"setup for {name}.{geometry}.{setup}", setup, known)
                for topology in row:
                    parse_topology(topology)


def _know(what: str, word: str, valid: Iterable[str]) -> None:
    """Raise UnknownName unless `word` is one of `valid`."""
    by_lower = {name.lower(): name for name in valid}
    if word in by_lower.values():
        return
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    hint = f" (did you mean {by_lower[near[0]]}?)" if near else ""
    raise UnknownName(f"there is no {what} called {word!r}{hint}; there are: {', '.join(by_lower.values())}")
