"""Where a case of the interface has a meaning. What a class is does not depend on the model; what is registered does."""

from __future__ import annotations

from model_matrix.cells import parse_topology
from model_matrix.geometries import FullAttention, Mla, load_geometries
from pytest_kvconform.result import Cell


def each_memory(cell: Cell) -> bool:
    """One cell for each geometry and setup: a worker half here is one rank, whatever the topology."""
    p, d = parse_topology(cell.topology)
    return p == d


def once(cell: Cell) -> bool:
    """One cell of all: the control family, one attention kind, equal ranks."""
    return load_geometries()[cell.family].family == "llama" and each_memory(cell) and cell.setup == "b16"


def has_groups(cell: Cell) -> bool:
    """Whether layers need block tables of their own: windows or states."""
    return not all(
        isinstance(kind, FullAttention | Mla) for kind in load_geometries()[cell.family].kinds.values()
    )
