"""From the matrix to cells: which families run at which topologies. The lists themselves are in `matrix.toml`."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from model_matrix.families import load_families

FILE = Path(__file__).with_name("matrix.toml")


class MatrixError(ValueError):
    """`matrix.toml` is wrong. The message names the file and the key."""


class UnknownName(ValueError):
    """A word that names no matrix, family or topology. The message has the nearest valid word and all of them."""


class Matrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each matrix: family id -> topologies."""

    quick: dict[str, list[str]]
    full: dict[str, list[str]]
    nightly: dict[str, list[str]]


def expand(matrix: str, families: Sequence[str] = (), topologies: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Cells of a matrix as (family id, topology), in the order of the file; empty selections choose everything.

    Two valid selections can have no cell in common: then the list is empty. Raises UnknownName.
    """
    matrices = msgspec.structs.asdict(load_matrices())
    _know("matrix", matrix, matrices)
    chosen: dict[str, list[str]] = matrices[matrix]
    for family in families:
        _know(f"family in the {matrix} matrix", family, chosen)
    for topology in topologies:
        parse_topology(topology)
        elsewhere = [name for name, rows in matrices.items() if topology in _topologies(rows)]
        if matrix not in elsewhere and elsewhere:
            raise UnknownName(f"topology {topology!r} is not in the {matrix} matrix, but in: {', '.join(elsewhere)}")
        _know(f"topology in the {matrix} matrix", topology, _topologies(chosen))
    return [
        (family, topology)
        for family, row in chosen.items()
        for topology in row
        if (not families or family in families) and (not topologies or topology in topologies)
    ]


def parse_topology(topology: str) -> tuple[int, int]:
    """Tensor parallel sizes of prefill and decode: "P1D2" -> (1, 2). Raises UnknownName."""
    if match := re.fullmatch(r"P([1-9][0-9]*)D([1-9][0-9]*)", topology, re.ASCII):
        return int(match[1]), int(match[2])
    near = f" (did you mean {topology.upper()}?)" if re.fullmatch(r"p[1-9]\d*d[1-9]\d*", topology, re.I | re.A) else ""
    raise UnknownName(f"{topology!r} is no topology{near}; one looks like P1D2: tensor parallel size of prefill and decode")


def _topologies(rows: dict[str, list[str]]) -> list[str]:
    return sorted({topology for row in rows.values() for topology in row})


@functools.cache
def load_matrices() -> Matrices:
    """The matrices of `matrix.toml`. Raises MatrixError."""
    return read_matrices(FILE)


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


def _know(what: str, word: str, valid: Iterable[str]) -> None:
    """Raise UnknownName unless `word` is one of `valid`."""
    by_lower = {name.lower(): name for name in valid}
    if word in by_lower.values():
        return
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    hint = f" (did you mean {by_lower[near[0]]}?)" if near else ""
    raise UnknownName(f"there is no {what} called {word!r}{hint}; there are: {', '.join(by_lower.values())}")
