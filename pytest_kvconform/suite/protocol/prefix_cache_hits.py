"""Hits in D's own prefix cache: what D loads then."""

from __future__ import annotations

from model_matrix import load_geometries
from model_matrix.geometries import State
from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, NotApplicable
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.scheduler.steps import ORDER_STEPS
from pytest_kvconform.suite.protocol._scenarios import (
    lengths,
    needs_hand_over,
    token_count,
)

ASKED, PLACED = "get_num_new_matched_tokens", "update_state_after_alloc"
# length of the prompt, and how much of it D has computed before
HITS = (
    "2b+5_b",
    "2b+5_2b",
    "3b_b",
    "3b_2b",
    "2b+1_b",
    "2b+1_2b",
    "b+1_b",
)


def has_states(cell: Cell) -> bool:
    """Whether some layers keep a recurrent state, in KV cache groups of their own."""
    return any(isinstance(kind, State) for kind in load_geometries()[cell.family].kinds.values())


def _ends_of(p: Side, p_id: str) -> set[int]:
    """Return the tokens of a request at which steps of P ended. A connector may save its states there."""
    return {step.scheduled[p_id][1] for step in p.steps if p_id in step.scheduled}


@case("KV-HIT-002", variants=lambda cell, matrix: HITS, rig="scheduler")
def load_starts_after_the_local_hit(rig: Rig, hit: str) -> Evidence:
    """Whatever D's prefix cache holds, D does not load that again: KV-MATCH-002 looks whether the load ends
    within the prompt. If the model has states, D's load ends no later than it does without a hit. How much D
    loads is the connector's choice, or as declared.
    """
    needs_hand_over(rig)
    p, cold, d = rig.side("P"), rig.side("D"), rig.side("D")
    length, warm = (token_count(words, d.block_size) for words in hit.split("_"))
    prompt = rig.prompt(length)
    d.warm_prefix_cache(prompt, warm)
    p_id, d_id = rig.hand_over_and_load(p, cold, prompt)
    id = d.add(prompt, p.kv_transfer_params(p_id))
    rig.step_until_matched(d, id)
    asked = d.calls_of(ASKED, id)[-1]
    local, external = asked.arguments["num_computed_tokens"], d.first_external_tokens(id)
    end, step = local + external, rig.subject.load_granularity or 1
    stop = cold.first_external_tokens(d_id)
    late = has_states(rig.cell) and end > stop
    if external and (late or (end != stop and end % step and external % step)):
        raise rig.violation(
            "",
            f"without a hit D loads the tokens up to {stop} of {len(prompt)}; with {local} of them in its "
            f"own cache {ASKED} returned {asked.result}, which ends at {end}",
            diagnosis="" if late else f"load_granularity = {step} is declared",
        )
    for side in (cold, d):
        side.run()
    p.run(sent=True)
    rig.require_no_leaks(p, cold, d)
    return Evidence(looked_at=1, unit="hits", external_tokens=external, notes={"local": local})


@case(
    "KV-HIT-003",
    applies=has_states,
    variants=lambda cell, matrix: ("no_hit", "hit", "diverged", "one_token_left"),
    rig="scheduler",
)
def load_includes_every_state(rig: Rig, situation: str) -> Evidence:
    """Whenever tokens are announced, the load has a slot for the state of every group.

    This holds however few attention blocks the load copies.
    """
    needs_hand_over(rig)
    p, d = rig.side("P"), rig.side("D")
    b = d.block_size
    prompt = rig.prompt(2 * b + (2 if situation == "one_token_left" else 5), shared=2 * b)
    # the state of the other prompt is of a later token and useless; its attention blocks are not
    if situation == "diverged":
        d.warm_prefix_cache(rig.prompt(3 * b + 1, seed=1, shared=2 * b), 3 * b + 1)
    elif situation != "no_hit":
        d.warm_prefix_cache(prompt, 2 * b)
    _, d_id = rig.hand_over_and_load(p, d, prompt)
    asked = d.calls_of(ASKED, d_id)[-1]
    [placed] = d.calls_of(PLACED, d_id)
    named = d.ordered_ids(d_id)
    names = [type(group.kv_cache_spec).__name__ for group in d.kv_config.kv_cache_groups]
    groups = [index for index, name in enumerate(names) if name == "MambaSpec"]
    if not any(map(d.owns_block, named)) and not _names_blocks(rig, prompt):
        raise NotApplicable("the metadata names no block in a form that the suite can read")
    slots = {group: set(placed.arguments["writable"][group]) for group in groups}
    for _ in range(ORDER_STEPS):  # a connector may order a load in parts
        if all(named & slots[group] for group in groups):
            break
        named |= d.step().block_ids_for(d_id)
    for group in groups:
        if not named & slots[group]:
            raise rig.violation(
                "",
                f"{asked.result[0]} tokens after {asked.arguments['num_computed_tokens']} were announced, "
                f"and the metadata names no slot of group {group} ({names[group]}): its state is not loaded",
                diagnosis="the load leaves out the state of a KV cache group",
            )
    d.run()
    p.run(sent=True)
    rig.require_no_leaks(p, d)
    notes = {"local": asked.arguments["num_computed_tokens"]}
    return Evidence(looked_at=len(groups), unit="groups", external_tokens=asked.result[0], notes=notes)


def _names_blocks(rig: Rig, prompt: tuple[int, ...]) -> bool:
    """Whether the metadata of a load without a hit names D's blocks."""
    d = rig.side("D")
    _, id = rig.hand_over_and_load(rig.side("P"), d, prompt)
    return any(map(d.owns_block, d.ordered_ids(id)))


def _stops(cell: Cell, matrix: str) -> list[str]:
    return lengths(cell, matrix) if has_states(cell) else ["1", "b+1"]


@case("KV-HIT-004", variants=_stops, rig="scheduler")
def load_ends_where_p_stopped(rig: Rig, length: str) -> Evidence:
    """D loads no more tokens than P has computed.

    For a model with states D loads up to a token at which P had a state: where a step of P ended, or at the
    end of a block. It does not load the last token of the prompt.
    """
    needs_hand_over(rig)
    p, d = rig.side("P"), rig.side("D")
    prompt = rig.prompt(token_count(length, d.block_size))
    p_id, d_id = rig.hand_over_and_load(p, d, prompt)
    ends, loaded, states = _ends_of(p, p_id), d.first_external_tokens(d_id), has_states(rig.cell)
    end = max(ends)
    if loaded > end or (states and loaded % d.block_size and loaded not in ends):
        why = "the state is of another token" if states else "the rest was never computed"
        raise rig.violation(
            "", f"of a prompt of {len(prompt)} tokens P computed {end}, and D loads {loaded}: {why}"
        )
    if states and loaded >= len(prompt) > 1:
        raise rig.violation(
            "",
            f"P computed all {end} tokens, and D loads them and computes the last one again, on a state that "
            "includes it",
        )
    d.run()
    p.run(sent=True)
    rig.require_no_leaks(p, d)
    return Evidence(looked_at=end, unit="tokens", external_tokens=loaded)
