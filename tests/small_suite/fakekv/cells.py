"""Stands for model_matrix.cells."""

from typing import NamedTuple


class Place(NamedTuple):
    """Stands for model_matrix.Place."""

    family: str
    topology: str
    setup: str = ""
    rig: str = "engine"


MATRIX = {
    "quick": [("llama", "P1D1"), ("gemma3", "P1D1"), ("gemma3", "P1D2")],
    "full": [("llama", "P1D1"), ("llama", "P1D2"), ("gemma3", "P1D1"), ("gemma3", "P1D2")],
}


def expand(matrix, families=(), topologies=()):
    cells = MATRIX[matrix]
    for family in families:
        if family not in dict(cells):
            raise ValueError(f"there is no family called {family!r} (did you mean gemma3?)")
    chosen = [
        cell
        for cell in cells
        if (not families or cell[0] in families) and (not topologies or cell[1] in topologies)
    ]
    return [Place(*cell, rig=rig) for rig in ("engine", "scheduler") for cell in chosen]
