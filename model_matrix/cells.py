"""From the matrix to cells: which families run at which topologies. The lists themselves are in `engine.toml` (engine
rig), `bytes.toml` (byte rig) and `scheduler.toml` (scheduler rig)."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from model_matrix.families import load_families
from model_matrix.geometries import load_geometries

ENGINE_FILE = Path(__file__).with_name("engine.toml")
BYTES_FILE = Path(__file__).with_name("bytes.toml")
SCHEDULER_FILE = Path(__file__).with_name("scheduler.toml")


class MatrixError(ValueError):
    """A matrix file is wrong. The message names the file and the key."""


class UnknownName(ValueError):
    """A word that names no matrix, family or topology. The message has the nearest valid word and all of them."""


class Place(NamedTuple):
    """One cell of a matrix."""

    family: str  # of the engine rig a family id, of the others a geometry id
    topology: str
    setup: str = ""  # not of the engine rig: a word of bytes.toml
    rig: str = "engine"  # or "bytes" or "scheduler"


class Matrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each matrix of the engine rig: family id -> topologies."""

    quick: dict[str, list[str]]
    full: dict[str, list[str]]
    nightly: dict[str, list[str]]


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How memory is laid out on one side."""

    block: int = 16  # tokens
    layout: str = ""
    dtype: str = "auto"
    content: Literal["backend", "packed"] = "packed"
    conv: Literal["DS", "SD"] = "DS"
    prefix_caching: bool = True
    kernel: int = 0  # tokens of a kernel's block, content "packed" only; 0: any multiple of 16


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How memory is laid out on both sides."""

    prefill: Side = Side()
    decode: Side = Side()


class ByteMatrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each matrix of the byte rig: geometry id -> setup -> topologies."""

    setups: dict[str, Setup]
    quick: dict[str, dict[str, list[str]]]
    full: dict[str, dict[str, list[str]]]


class SchedulerMatrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each matrix of the scheduler rig: geometry id -> setup of bytes.toml -> topologies."""

    quick: dict[str, dict[str, list[str]]]
    full: dict[str, dict[str, list[str]]]


def expand(matrix: str, families: Sequence[str] = (), topologies: Sequence[str] = ()) -> list[Place]:
    """Cells of a matrix, those of the engine rig first, in the order of the files; empty selections choose everything.

    A family selects its geometries, too; a geometry can be selected by its own id. Two valid selections can have no cell in common: then
    the list is empty. Raises UnknownName.
    """
    _know("matrix", matrix, msgspec.structs.asdict(load_matrices()))
    chosen = _places(matrix)
    words = {
        place: {place.family, *([load_geometries()[place.family].family] if place.rig != "engine" else [])}
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
        elsewhere = [
            name for name in msgspec.structs.asdict(load_matrices()) if topology in _topologies(_places(name))
        ]
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
    """Every cell of one matrix. Only the engine rig has something of its own for the nightly one: bytes are the same on any day."""
    engine: dict[str, list[str]] = getattr(load_matrices(), matrix)
    name = "full" if matrix == "nightly" else matrix
    others: dict[str, dict[str, dict[str, list[str]]]] = {
        "bytes": getattr(load_byte_matrices(), name),
        "scheduler": getattr(load_scheduler_matrices(), name),
    }
    return [Place(family, topology) for family, row in engine.items() for topology in row] + [
        Place(geometry, topology, setup, rig)
        for rig, rows in others.items()
        for geometry, setups in rows.items()
        for setup, row in setups.items()
        for topology in row
    ]


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


@functools.cache
def load_matrices() -> Matrices:
    """The matrices of `engine.toml`. Raises MatrixError."""
    return read_matrices(ENGINE_FILE)


def read_matrices(path: Path) -> Matrices:
    """Read a matrix file. Raises MatrixError naming the file and the key; OSError if it cannot be read."""
    try:
        matrices = msgspec.toml.decode(path.read_bytes(), type=Matrices)
        for name, rows in msgspec.structs.asdict(matrices).items():
            for family, row in rows.items():
                _know(f"family for {name}.{family}", family, load_families())
                for topology in row:
                    parse_topology(topology)
    except (msgspec.MsgspecError, UnknownName) as error:
        raise MatrixError(f"{path.name}: {error}") from error
    return matrices


@functools.cache
def load_byte_matrices() -> ByteMatrices:
    """The setups and matrices of `bytes.toml`. Raises MatrixError."""
    return read_byte_matrices(BYTES_FILE)


def read_byte_matrices(path: Path) -> ByteMatrices:
    """Read a matrix file of the byte rig. Raises MatrixError naming the file and the key; OSError if it cannot be read."""
    try:
        matrices = msgspec.toml.decode(path.read_bytes(), type=ByteMatrices)
        _check_rows(matrices, matrices.setups)
    except (msgspec.MsgspecError, UnknownName) as error:
        raise MatrixError(f"{path.name}: {error}") from error
    return matrices


@functools.cache
def load_scheduler_matrices() -> SchedulerMatrices:
    """The matrices of `scheduler.toml`. Raises MatrixError."""
    return read_scheduler_matrices(SCHEDULER_FILE)


def read_scheduler_matrices(path: Path) -> SchedulerMatrices:
    """Read a matrix file of the scheduler rig. Raises MatrixError naming the file and the key; OSError if it cannot be read."""
    try:
        matrices = msgspec.toml.decode(path.read_bytes(), type=SchedulerMatrices)
        _check_rows(matrices, load_byte_matrices().setups)
    except (msgspec.MsgspecError, UnknownName) as error:
        raise MatrixError(f"{path.name}: {error}") from error
    return matrices


def _check_rows(matrices: ByteMatrices | SchedulerMatrices, known: dict[str, Setup]) -> None:
    """Raise UnknownName unless geometries, setups and topologies are known."""
    for name in ("quick", "full"):
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
