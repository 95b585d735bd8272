"""The features: the closed list of what a connector may support or not, and which of them a case needs. The list is features.toml.

What a case needs follows from where it runs (kinds of layers, what differs between P and D), from what its variant does, and from its rule.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from model_matrix import load_byte_matrices, load_families, load_geometries, parse_topology
from model_matrix.geometries import FullAttention, Mla, SlidingWindow, State
from pytest_kvconform.result import Cell

if TYPE_CHECKING:
    from pytest_kvconform.plan import PlannedCase

CELL_FACTS = frozenset("full window mla state draft tp block layout".split())
CASE_FACTS = frozenset("hit preempt abort fails-recompute fails-fail silence".split())

_KINDS = {FullAttention: "full", SlidingWindow: "window", Mla: "mla", State: "state"}
_LAYER_TYPES = {
    "full_attention": "full",
    "sliding_attention": "window",
    "linear_attention": "state",
}  # words of config.json


class Feature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the list."""

    says: str
    facts: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    loads: bool = False  # whether a case that passes shows it only where D was given KV

    @property
    def of_cell(self) -> bool:
        """Whether it is a matter of where a case runs alone: then only bytes that were moved there show that it works."""
        return bool(self.facts) and CELL_FACTS.issuperset(self.facts)


@functools.cache
def load() -> dict[str, Feature]:
    """Every feature by name, in the order of the file."""
    return msgspec.toml.decode(
        Path(__file__).with_name("features.toml").read_bytes(), type=dict[str, Feature]
    )


def required_features(planned: PlannedCase) -> tuple[str, ...]:
    """Names of the features that a case needs, in the order of the list."""
    facts = cell_facts(planned.cell) | set(variant_facts(planned.variant))
    return tuple(
        name
        for name, feature in load().items()
        if (feature.facts and facts.issuperset(feature.facts))
        or any(matches(glob, planned.case.rule) for glob in feature.rules)
        or any(matches(glob, planned.id) for glob in feature.cases)
    )


def matches(glob: str, name: str) -> bool:
    """Whether a glob of * and ? fits an id. A bracket of an id stands for itself."""
    return fnmatch.fnmatchcase(name, glob.replace("[", "[[]"))


@functools.cache
def cell_facts(cell: Cell) -> frozenset[str]:
    """The facts of a cell: kinds of layers, and what P and D do not have in common."""
    facts = set(_layers(cell))
    p, d = parse_topology(cell.topology)
    if p != d:
        facts.add("tp")
    if cell.setup:
        setup = load_byte_matrices().setups[cell.setup]
        orders = [(side.layout, side.content, side.conv) for side in (setup.prefill, setup.decode)]
        facts |= ({"block"} if setup.prefill.block != setup.decode.block else set()) | (
            {"layout"} if orders[0] != orders[1] else set()
        )
    return frozenset(facts)


def _layers(cell: Cell) -> Iterator[str]:
    if not cell.setup:  # a tiny model
        config = load_families()[cell.family].config
        yield from (_LAYER_TYPES[word] for word in config.get("layer_types", ["full_attention"]))
        return
    geometry = load_geometries()[cell.family]
    yield from (_KINDS[type(kind)] for kind in geometry.kinds.values())
    if geometry.draft_layers:
        yield "draft"


def variant_facts(variant: Any) -> Iterator[str]:
    """The facts of what a case does. `variant` is a Scenario, a Transfer, or anything else: what it does not have it does not do."""
    if any(prompt.warm for prompt in getattr(variant, "prompts", ())):
        yield "hit"
    for what in ("preempt", "abort"):
        if getattr(variant, what, ""):
            yield what
    if getattr(variant, "fails", False):
        yield f"fails-{variant.policy}"
    if any(faults.notifications == "never" for faults in getattr(variant, "faults", ())):
        yield "silence"
