"""Levels of the verdict. Every rule has one, in its table, and every feature, in features.toml.

The level of a case is the last one, in the order of `LEVELS`, among that of its rule and those of the
features that the case needs. So a comparison of bytes is `core` for a model with one kind of KV cache,
`hybrid` for gemma3, and `heterogeneous` for gemma3 at P1D2. A fault stays `resilient` wherever it happens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Level = Literal["core", "hybrid", "heterogeneous", "resilient", "accurate"]
LEVELS: dict[Level, str] = {  # what a connector of the level does right, in the order of the table
    "core": "bytes, outputs, blocks, and the life of requests and engines, with one kind of KV cache and "
    "equal P and D",
    "hybrid": "the same for models with several kinds of KV cache: windows, states, MLA beside others, draft",
    "heterogeneous": "the same where P and D differ: in tensor parallel size, block size or layout",
    "resilient": "faults, leases, restarts, clocks and hostile parameters harm only their own request",
    "accurate": "questions that a router sends to P and D are answered as D alone answers them",
}


def last_level(levels: Iterable[Level]) -> Level:
    """Return the level that comes last in `LEVELS`."""
    return max(levels, key=list(LEVELS).index)
