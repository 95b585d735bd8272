"""Speculative decoding: slots beyond the tokens, states with scratch blocks, and the order of hooks."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster, Steps, Wanted
from pytest_kvconform.suite.protocol.stress._live import (
    first_alone,
    hand_over_and_check,
    in_full,
    loaded,
    plain,
    prompts_of,
    settle,
    with_states,
)

NEAR = (-7, -3, 0)  # tokens from the end of the third block: slots of the draft need a block more, or not


def _sides(cell: Cell, matrix: str) -> tuple[str, ...]:
    """The engines that speculate. States of an engine that does have another shape."""
    return first_alone(cell, matrix, "PD", *(() if with_states(cell) else "PD"))


@case(
    "KV-SPEC-001",
    applies=lambda cell: plain(cell) or with_states(cell),
    variants=_sides,
    rig="scheduler",
    script=True,
)
def kv_arrives_beside_slots_of_drafts(cluster: Cluster, sides: str) -> Steps:
    """Slots that vLLM allocates for tokens of a draft model hold no KV: neither lookahead tokens at the end
    of a table nor scratch blocks behind a state. Hooks are called in the order that they have with a drafter.
    """
    # P has no KV for a draft model of D alone
    methods = {"PD": ("eagle3", "eagle3"), "P": ("eagle3", ""), "D": ("", "ngram")}[sides]
    yield from cluster.start(
        *(Wanted(role, blocks=48, method=method) for role, method in zip("PD", methods, strict=True))
    )
    near, blocks = (NEAR, 3) if plain(cluster.cell) else (NEAR[1:2], 1)
    prompts = prompts_of(cluster, [blocks * cluster.block(cluster.d) + more for more in near])
    return (yield from hand_over_and_check(cluster, prompts))


@case("KV-SPEC-002", applies=plain, variants=in_full, rig="scheduler", script=True)
def wait_for_save_may_come_after_the_results(cluster: Cluster, variant: None) -> Steps:
    """With a draft model vLLM calls wait_for_save after get_transfer_results, not before."""
    yield from cluster.start(Wanted("P", method="eagle3"), Wanted("D", method="eagle3"))
    p, block = cluster.p, cluster.block(cluster.p)
    prompts = prompts_of(cluster, [3 * block + 5] * 2)
    ids, others = (yield from cluster.prefill(prompts)), []
    for owner, prompt in prompts_of(cluster, [3 * block] * 4, first=2).items():
        others.append((yield from cluster.add(p, prompt, owner)))
    yield from cluster.settle(lambda: cluster.ended(p, others), "other requests of P")
    if cluster.store:
        yield from p.call("evict_prefix_cache")
    found = yield from cluster.decode(prompts, ids)
    yield from settle(cluster, found)
    return (yield from loaded(cluster, found))
