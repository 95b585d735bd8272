"""Speculative decoding: slots beyond the tokens, states with scratch blocks, and the order of hooks."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence
from pytest_kvconform.rigs.scheduler.live.config import LiveSpec
from pytest_kvconform.rigs.scheduler.live.pair import live_engines
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.protocol.stress._live import (
    decode,
    first_alone,
    in_full,
    loaded,
    plain,
    prefill,
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
)
def kv_arrives_beside_slots_of_drafts(rig: Rig, sides: str) -> Evidence:
    """Slots that vLLM allocates for tokens of a draft model hold no KV: neither lookahead tokens at the end
    of a table nor scratch blocks behind a state. Hooks are called in the order that they have with a drafter.
    """
    # P has no KV for a draft model of D alone
    methods = {"PD": ("eagle3", "eagle3"), "P": ("eagle3", ""), "D": ("", "ngram")}[sides]
    p = LiveSpec("P", blocks=48, method=methods[0])
    d = LiveSpec("D", engine=1, port=1, blocks=48, method=methods[1])
    with live_engines(rig, p, d) as live:
        block = live.d.side.block_size
        near = NEAR if plain(rig.cell) else NEAR[1:2]
        blocks = 3 if plain(rig.cell) else 1
        prompts = prompts_of(live, [blocks * block + more for more in near])
        ids = decode(live, prompts, prefill(live, prompts))
        settle(live, ids)
        return loaded(live, ids)


@case("KV-SPEC-002", applies=plain, variants=in_full, rig="scheduler")
def wait_for_save_may_come_after_the_results(rig: Rig, variant: None) -> Evidence:
    """With a draft model vLLM calls wait_for_save after get_transfer_results, not before."""
    p = LiveSpec("P", method="eagle3")
    d = LiveSpec("D", engine=1, port=1, method="eagle3")
    with live_engines(rig, p, d) as live:
        block = rig.host.spec.memory["P"].block
        prompts = prompts_of(live, [3 * block + 5] * 2)
        ids = prefill(live, prompts)
        more = prompts_of(live, [3 * block] * 4, first=2)
        others = [live.p.add(prompt, owner) for owner, prompt in more.items()]
        live.settle(lambda: live.p.ended(others), "other requests of P")
        if live.store:
            live.p.evict_prefix_cache()
        found = decode(live, prompts, ids)
        settle(live, found)
        return loaded(live, found)
