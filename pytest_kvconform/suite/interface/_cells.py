"""Cells in which cases of the interface tier have a meaning.

The class does not depend on the model; registered memory does.
"""

from __future__ import annotations

from model_matrix.cells import parse_topology
from model_matrix.geometries import FullAttention, Mla, load_geometries
from pytest_kvconform.result import Cell


def each_memory(cell: Cell) -> bool:
    """Whether this is the one cell of its geometry and setup.

    A worker half here is one rank, whatever the topology.
    """
    p, d = parse_topology(cell.topology)
    return p == d


def once(cell: Cell) -> bool:
    """Whether this is the cell for cases that run once.

    It has the control family, one kind of attention, and equal ranks.
    """
    return load_geometries()[cell.family].family == "llama" and each_memory(cell) and cell.setup == "b16"


def cell_of_once() -> Cell:
    """The cell of `once`, for a case of another tier that asks what these cases ask."""
    family = next(name for name, geometry in load_geometries().items() if geometry.family == "llama")
    return Cell(family, "P1D1", "b16")


def has_groups(cell: Cell) -> bool:
    """Whether some layers need block tables of their own: sliding windows or recurrent states."""
    return not all(
        isinstance(kind, FullAttention | Mla) for kind in load_geometries()[cell.family].kinds.values()
    )
