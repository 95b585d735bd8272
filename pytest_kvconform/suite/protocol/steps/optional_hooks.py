"""Optional hooks, called as vLLM's scheduler calls them, with blocks or events at stake."""

from __future__ import annotations

from typing import Any

from model_matrix import load_geometries
from model_matrix.geometries import State
from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, NotApplicable
from pytest_kvconform.rigs.scheduler.leaks import is_opaque
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.suite.interface.capabilities import truth
from pytest_kvconform.suite.protocol._scenarios import PROMPT, report_all, token_count
from pytest_kvconform.suite.protocol.multi_connector import _dense

TAIL = "register_finished_partial_tail"
ORDERED = 20  # steps in which an accepted tail has to be ordered
IDLE = 5  # steps after the last request in which no event is new


def has_state(cell: Cell) -> bool:
    """Whether layers keep states: vLLM offers partial tails of no other group."""
    kinds = load_geometries()[cell.family].kinds.values()
    return any(isinstance(kind, State) for kind in kinds)


@case("KV-HOOK-005", applies=has_state, rig="scheduler")
def accepted_partial_tail_is_saved_and_freed(rig: Rig, _: None) -> Evidence:
    """A connector that accepts a partial tail orders its save, and frees the blocks when it is reported.

    vLLM offers a block with a state that ends within the block, when its request ends.
    """
    p = rig.side("P")
    if not p.config.kv_transfer_config.is_kv_producer:
        raise NotApplicable(f"{rig.subject.connector} is not configured as a producer: vLLM offers no tail")
    group = next(
        index
        for index, of in enumerate(p.kv_config.kv_cache_groups)
        if type(of.kv_cache_spec).__name__ == "MambaSpec"
    )
    offered: list[tuple[int, int, int]] = []

    def finalize_partial_tail_offloads(request: Any) -> list[tuple[int, int, int]]:
        block = [block for block in p.blocks(request.request_id)[group] if block][-1]
        offered.append((group, block, request.num_computed_tokens))
        return offered[-1:]

    p.manager.finalize_partial_tail_offloads = finalize_partial_tail_offloads
    id = p.add(rig.prompt(token_count(PROMPT, p.block_size)))  # nothing else of it is handed over
    p.run()
    answers = [call.result for call in p.calls_of(TAIL)]
    if not answers:
        raise NotApplicable("vLLM offers no partial tail of this model")
    accepted = [truth(rig, f"{TAIL}()", answer) for answer in answers]
    if accepted[0]:
        _require_order(rig, p, id, offered[0][1])
    report_all(p)
    rig.require_no_leaks(p)
    return Evidence(looked_at=len(answers), unit="tails", notes={"accepted": sum(accepted)})


def _require_order(rig: Rig, p: Side, id: str, block: int) -> None:
    """Raise Violation unless the metadata orders something of this block or request."""

    def ordered() -> bool:
        return p.steps[-1].mentions(id) or block in p.steps[-1].block_ids_for(id)

    for _ in range(ORDERED):
        last = p.step()
        if ordered():
            return
    if rig.steps_on(p, ordered):
        return
    readable = any(step.mentions(name) for step in p.steps for name in p.prompts)
    if not readable and is_opaque(last.metadata):
        raise NotApplicable("the metadata names no request in a form that the suite can read")
    raise rig.violation(
        "",
        f"{TAIL} returned True for block {block}, and the metadata of the next {ORDERED} steps does not name "
        f"{id}: no worker can report it, and the blocks are never freed",
        diagnosis="the connector accepts the tail and forgets it",
    )


@case("KV-HOOK-006", applies=_dense, rig="scheduler")
def events_are_taken_once(rig: Rig, _: None) -> Evidence:
    """take_events gives each event once: vLLM publishes what it gives in every step."""
    side, given = rig.side("P"), list[list[Any]]()
    take = side.connector.take_events

    def take_events() -> list[Any]:
        given.append(list(take() or ()))  # vLLM looks no further where there is nothing
        return given[-1]

    side.connector.take_events = take_events
    for seed in range(3):
        side.add(rig.prompt(token_count(PROMPT, side.block_size), seed=seed), rig.prefill_params() or None)
        side.run()
    report_all(side)
    before = [repr(event) for events in given for event in events]
    for _step in range(IDLE):
        side.step()
    idle = [{repr(event) for event in events} for events in given[-IDLE:]]
    if again := set.intersection(*idle) & set(before):
        raise rig.violation(
            "",
            f"take_events gave {len(again)} events again in each of {IDLE} steps without a request: vLLM "
            "publishes them once more in every step",
            differs=min(again)[:200],
            diagnosis="take_events does not empty what it returns",
        )
    return Evidence(looked_at=len(given), unit="calls", notes={"events": len(before)})
