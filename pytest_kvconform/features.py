"""Features of a connector: the closed list in features.toml, and which of them a case needs.

The features that a case needs follow from its cell (kinds of layers, differences between P and D), from its
variant (what happens to the requests) and from its rule.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from model_matrix import load_byte_matrices, load_families, load_geometries, parse_topology
from model_matrix.geometries import FullAttention, Mla, SlidingWindow, State
from pytest_kvconform.result import Cell, Level

if TYPE_CHECKING:
    from pytest_kvconform.plan import PlannedCase

CELL_FACTS = frozenset(
    "full-attention sliding-window mla state draft-model tp-differs block-size-differs layout-differs".split()
)
VARIANT_FACTS = frozenset("prefix-hit preemption abort failed-load-recompute failed-load-fail".split())

# Rules about what arrives, and where. Their failures show that a feature of the cell alone fails. A failure
# of any other rule, such as a port that is taken or blocks that leak, shows nothing about kinds of layers.
RULES_OF_CELLS = (
    "KV-START-*",
    "KV-HANDOVER-*",
    "KV-BYTES-*",
    "KV-WINDOW-*",
    "KV-STATE-*",
    "KV-OUTPUT-*",
    "KV-REGISTER-*",
    "KV-LAYOUT-*",
    "KV-GROUPS-*",
    "KV-MATCH-008",
    "KV-HIT-003",
    "KV-HIT-004",
)

_FACT_OF_KIND = {
    FullAttention: "full-attention",
    SlidingWindow: "sliding-window",
    Mla: "mla",
    State: "state",
}
_FACT_OF_LAYER_TYPE = {  # words of `Family.kinds`
    "full_attention": "full-attention",
    "sliding_attention": "sliding-window",
    "linear_attention": "state",
    "latent_attention": "mla",
}


class Feature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One feature of the list. features.toml explains the fields."""

    meaning: str
    level: Level
    facts: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    shown_by_load: bool = False
    refusable: bool = True
    impossible: dict[str, str] = {}
    optional: bool = False

    @property
    def of_cell_alone(self) -> bool:
        """Whether the feature depends on the cell alone.

        Then only bytes that moved in the cell show that it works.
        """
        return bool(self.facts) and CELL_FACTS.issuperset(self.facts)


@functools.cache
def load() -> dict[str, Feature]:
    """Return every feature by name, in the order of the file."""
    return msgspec.toml.decode(
        Path(__file__).with_name("features.toml").read_bytes(), type=dict[str, Feature]
    )


def required_features(planned: PlannedCase) -> tuple[str, ...]:
    """Return the names of the features that a case needs, in the order of the list."""
    facts = cell_facts(planned.cell) | set(variant_facts(planned.variant))
    return tuple(
        name
        for name, feature in load().items()
        if (feature.facts and facts.issuperset(feature.facts))
        or any(matches(glob, planned.case.rule) for glob in feature.rules)
        or any(matches(glob, planned.id) for glob in feature.cases)
    )


def is_about(name: str, rule: str, needed: Sequence[str]) -> bool:
    """Whether a case is about what a feature does. `rule`: id of the rule that the case shows to be broken.
    `needed`: the features that the case needs.

    A feature of the cell alone has nothing to do with the fate of a request (an abort, a preemption, a
    failed load), which is a feature of its own.
    """
    every = load()
    if not every[name].of_cell_alone:
        return True
    return any(matches(glob, rule) for glob in RULES_OF_CELLS) and all(
        every[other].of_cell_alone or every[other].shown_by_load for other in needed
    )


def matches(glob: str, name: str) -> bool:
    """Whether a glob of * and ? matches an id. A bracket in the glob matches a bracket in the id."""
    return fnmatch.fnmatchcase(name, glob.replace("[", "[[]"))


@functools.cache
def cell_facts(cell: Cell) -> frozenset[str]:
    """Return the facts of a cell: its kinds of layers, and what differs between P and D."""
    facts = set(_layer_facts(cell))
    p, d = parse_topology(cell.topology)
    if p != d:
        facts.add("tp-differs")
    if cell.setup:
        setup = load_byte_matrices().setups[cell.setup]
        if setup.prefill.block != setup.decode.block:
            facts.add("block-size-differs")
        orders = [(side.layout, side.content, side.conv) for side in (setup.prefill, setup.decode)]
        if orders[0] != orders[1]:
            facts.add("layout-differs")
    return frozenset(facts)


def same_on_every_rank(cell: Cell) -> bool:
    """Whether every rank has the KV of all heads: there is one head, or latent attention.

    Where tensor parallel sizes differ, whichever rank of P is read has what a rank of D needs.
    """
    if cell.setup:
        kinds = load_geometries()[cell.family].kinds.values()
        return all(isinstance(kind, Mla) or getattr(kind, "kv_heads", 0) == 1 for kind in kinds)
    return all(
        word == "latent_attention"
        or (word != "linear_attention" and model.config["num_key_value_heads"] == 1)
        for model in load_families()[cell.family].models
        for word in model.kinds
    )


def _layer_facts(cell: Cell) -> Iterator[str]:
    if not cell.setup:  # a tiny checkpoint
        family = load_families()[cell.family]
        yield from (_FACT_OF_LAYER_TYPE[word] for model in family.models for word in model.kinds)
        if family.draft:
            yield "draft-model"
        return
    geometry, side = load_geometries()[cell.family], load_byte_matrices().setups[cell.setup].decode
    kinds = {type(kind) for kind in geometry.kinds.values()}
    if not side.hma:  # without it every layer of attention keeps all tokens
        kinds = {FullAttention if kind is SlidingWindow else kind for kind in kinds}
    yield from (_FACT_OF_KIND[kind] for kind in kinds)
    if geometry.draft_layers:
        yield "draft-model"


def variant_facts(variant: Any) -> Iterator[str]:
    """Yield the facts of a variant: a Scenario, a Transfer, or an object without these attributes."""
    if any(prompt.warm or prompt.turn for prompt in getattr(variant, "prompts", ())):
        yield "prefix-hit"
    if getattr(variant, "preempt", ""):
        yield "preemption"
    if getattr(variant, "abort", ""):
        yield "abort"
    if getattr(variant, "fails", False):
        yield f"failed-load-{variant.policy}"
