"""Families of KV cache as tiny models, topologies and prompt lengths: data, and what expands it. Imports neither vLLM nor torch."""

from model_matrix.cells import UnknownName, expand, parse_topology
from model_matrix.checkpoints import CheckpointError, ensure_checkpoint
from model_matrix.families import Family, load_families
from model_matrix.prompts import prompt_lengths

__all__ = [
    "CheckpointError",
    "Family",
    "UnknownName",
    "ensure_checkpoint",
    "expand",
    "load_families",
    "parse_topology",
    "prompt_lengths",
]
