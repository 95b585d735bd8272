"""For each profile and each feature that its connectors can have: a right connector, and cases that test it.

Where the plan has no such case, no connector of the profile could have a verdict if it declared the feature.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_kvconform.plan import PlannedCase, make_plan
from pytest_kvconform.settings import Settings

STORES = "tests.right_connectors.stores"
REFERENCE = "reference_connector:ReferenceConnector"


@functools.cache
def every(matrix: str) -> tuple[PlannedCase, ...]:
    """All cases of a matrix."""
    return make_plan(Settings(matrix=matrix), ()).every


@dataclass(frozen=True)
class Witness:
    """Cases of one cell that a right connector of a profile passes. Together they need these features."""

    profile: str
    connector: str
    cell: str  # family, topology and setup: "llama3_1_8b P1D1 b16"
    cases: str  # words: "<tier>/<module>::<case>[<variant>]", with the variants as a list: "[n17,hit1]"
    features: str  # words
    matrix: str = "quick"

    @property
    def tier(self) -> str:
        return self.cases.partition("/")[0]

    @property
    def names(self) -> set[str]:
        """`<case>[<variant>]` of each case, as `CellRun.outcomes` has them."""
        found = set()
        for word in self.cases.split():
            case, _, variants = word.partition("::")[2].rstrip("]").partition("[")
            found |= {f"{case}[{variant}]" if variant else case for variant in variants.split(",")}
        return found

    def planned(self) -> Iterator[PlannedCase]:
        """The cases in the plan of the matrix."""
        modules = {word.partition("::")[0] for word in self.cases.split()}
        for one in every(self.matrix):
            variant = "" if one.variant is None else f"[{one.variant}]"
            cell = f"{one.cell.family} {one.cell.topology} {one.cell.setup}".strip()
            if one.module in modules and cell == self.cell and f"{one.case.name}{variant}" in self.names:
                yield one


def _bytes(profile: str, connector: str, states: str, faults: str) -> Iterator[Witness]:
    """What every profile has in common. `states`: a connector for models with states; `faults`: one whose
    loads can be made to fail.
    """
    loads = "bytes/handover::d_loads_all_whole_blocks"
    llama, kimi = "llama3_1_8b P1D1 b16", "kimi_k2_5_eagle3 P2D2 b16"
    yield Witness(
        profile,
        connector,
        llama,
        f"{loads}[n17,hit1] bytes/pool::attention_kv_arrives[preempted_on_d]",
        "full-attention prefix-hit preemption",
    )
    yield Witness(profile, connector, "gemma3_1b P1D1 b16", f"{loads}[n55]", "sliding-window")
    yield Witness(profile, connector, kimi, f"{loads}[n17]", "mla-and-gqa speculative-draft")
    yield Witness(
        profile,
        states,
        "kimi_linear_48b P1D1 mla64",
        f"{loads}[hit_of_one] bytes/pool::recurrent_state_arrives[n1957]",
        "mla mamba-state mla-and-state state-prefix-hit",
        "full",  # in the quick one a hit of a block, as long as a state, leaves a store nothing to load
    )
    yield Witness(
        profile,
        faults,
        llama,
        "bytes/transport_faults::every_request_ends[failed,recomputed]",
        "load-failure-fail load-failure-recompute",
    )
    yield Witness(
        profile,
        connector,
        llama,
        "protocol/multi_connector::handshake_metadata_reaches_scheduler_half[first]",
        "multi-connector",
    )


def _unlike(profile: str, latents: str, layouts: str) -> Iterator[Witness]:
    """P and D that differ. `latents`: a connector for models with latent attention."""
    loads = "bytes/handover::d_loads_all_whole_blocks"
    yield Witness(profile, latents, "deepseek_v3 P1D2 b16", f"{loads}[n17]", "tp-heterogeneous")
    yield Witness(profile, latents, "deepseek_v3 P1D1 b16x64", f"{loads}[n129]", "block-size-heterogeneous")
    yield Witness(
        profile, layouts, "llama3_1_8b P1D1 hnd_nhd", f"{loads}[n17]", "layout-heterogeneous", "full"
    )


_LLAMA = "llama3_1_8b P1D1 b16"
_ABORT_OF_STORE = "protocol/stores/aborts::abort_of_a_load_leaves_others_alone[loading]"
WITNESSES = (
    *_bytes("p2p", REFERENCE, REFERENCE, REFERENCE),
    *_unlike("p2p", REFERENCE, REFERENCE),
    Witness("p2p", REFERENCE, _LLAMA, "protocol/aborts::abort_leaves_its_twin_alone", "abort"),
    Witness("p2p", REFERENCE, _LLAMA, "protocol/peers/lease::expired_lease_frees_blocks", "lease"),
    Witness(
        "p2p",
        REFERENCE,
        _LLAMA,
        "protocol/peers/unreachable::restarted_peer_is_a_new_engine[stranger]",
        "peer-restart",
    ),
    Witness(
        "p2p",
        "tests.wrong_connectors.turns.right:KeepsForTheNextTurn",
        _LLAMA,
        "bytes/turns/next_turn::p_loads_what_d_has[next_turn]",
        "bidirectional",
    ),
    *_bytes(
        "store",
        f"{STORES}:WholeBlocks",
        "tests.wrong_connectors.store.states:WithStates",
        "tests.wrong_connectors.faults.stores:InTheStep",
    ),
    *_unlike("store", "tests.wrong_connectors.store.aborts:Latents", f"{STORES}:WholeBlocks"),
    Witness("store", f"{STORES}:WholeBlocks", _LLAMA, _ABORT_OF_STORE, "abort"),
    *_bytes(
        "same-engine",
        f"{STORES}:InMemory",
        "tests.wrong_connectors.store.states:WithStates",
        "tests.wrong_connectors.faults.stores:InMemoryInTheStep",
    ),
    Witness("same-engine", f"{STORES}:InMemory", _LLAMA, _ABORT_OF_STORE, "abort"),
)
