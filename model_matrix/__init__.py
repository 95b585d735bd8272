"""Model matrix: families as tiny and real checkpoints, geometries, topologies, prompt lengths, and cells.

The matrix is data in TOML files, and code that expands it into cells. It imports neither vLLM nor torch.
"""

from model_matrix.cells import (
    Place,
    Setup,
    Side,
    UnknownName,
    expand,
    load_accuracy_matrices,
    load_byte_matrices,
    parse_topology,
)
from model_matrix.checkpoints import CheckpointError, ensure_checkpoint, speculative_config
from model_matrix.families import Family, load_families
from model_matrix.geometries import Geometry, load_geometries
from model_matrix.nightly import NIGHTLY, RealCheckpoint, load_real_checkpoints
from model_matrix.prompts import prompt_lengths

__all__ = [
    "NIGHTLY",
    "CheckpointError",
    "Family",
    "Geometry",
    "Place",
    "RealCheckpoint",
    "Setup",
    "Side",
    "UnknownName",
    "ensure_checkpoint",
    "expand",
    "load_accuracy_matrices",
    "load_byte_matrices",
    "load_families",
    "load_geometries",
    "load_real_checkpoints",
    "parse_topology",
    "prompt_lengths",
    "speculative_config",
]
