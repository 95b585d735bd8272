"""build_connector_meta: the metadata that a connector sends to its workers in each step."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, HarnessError, NotApplicable
from pytest_kvconform.rigs.engine.objects import walk
from pytest_kvconform.rigs.scheduler.own_workers.memory import Ending
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.suite.protocol._scenarios import (
    PROMPT,
    endings,
    first_in_quick,
    needs_hand_over,
    needs_metadata_of_loads_only,
    report_all,
    run_mixed_requests,
    run_to_end,
    token_count,
)

BUILT = "build_connector_meta"
IDLE_STEPS, LATER_STEPS = 2, 5  # without a request, and all steps in which an order could come too late


def _situations(cell: Cell, matrix: str) -> tuple[Ending | str, ...]:
    return ("empty", *endings(cell, matrix))


@case("KV-META-001", variants=_situations, rig="scheduler")
def metadata_survives_pickle(rig: Rig, situation: Ending | str) -> Evidence:
    """In every step build_connector_meta returns a KVConnectorMetadata that survives pickle.

    This holds for empty steps, too. The recorder checks each step.
    """
    if isinstance(situation, str):  # "empty"
        sides: tuple[Side, ...] = (rig.side("P"), rig.side("D"))
    else:
        _, _, sides = run_to_end(rig, situation)
        report_all(*sides)
    for side in sides:
        side.step()
    return Evidence(looked_at=sum(len(side.calls_of(BUILT)) for side in sides), unit="steps")


@case("KV-META-002", variants=first_in_quick("P", "D"), rig="scheduler")
def build_connector_meta_leaves_scheduler_output_unchanged(rig: Rig, role: str) -> Evidence:
    """build_connector_meta does not change the scheduler's output. The recorder compares every field."""
    side = run_mixed_requests(rig, role)
    reported = [
        name
        for name in ("scheduled", "finished", "preempted")
        if not any(getattr(step, name) for step in side.steps)
    ]
    if reported:
        raise HarnessError(
            f"no step of {side.name} had a request that was {reported[0]}, so nothing could be changed there"
        )
    return Evidence(looked_at=len(side.calls_of(BUILT)), unit="steps")


@case("KV-META-003", variants=first_in_quick("hit", "no_hit", "one_token"), rig="scheduler")
def load_is_not_ordered_into_freed_blocks(rig: Rig, situation: str) -> Evidence:
    """A load that has ended is not ordered again after its request was aborted: vLLM has freed the blocks.

    The load is reported in the step in which it is ordered.
    """
    needs_hand_over(rig)
    needs_metadata_of_loads_only(rig)
    p, d = rig.side("P"), rig.side("D")
    prompt = rig.prompt(1 if situation == "one_token" else token_count(PROMPT, d.block_size))
    if situation == "hit":
        d.warm_prefix_cache(prompt, d.block_size)
    _, d_id = rig.hand_over(p, d, prompt, max_tokens=2)
    d.report_loads_at_once = True
    rig.step_until_matched(d, d_id)
    if not d.loads_started(d_id):
        rig.start_loads(d, d_id)
    while d.waits_for_remote_kv(d_id):
        d.step()
    d.abort(d_id)
    _require_no_order(rig, d, d_id)
    if not any(any(map(d.owns_block, step.block_ids_for(d_id))) for step in d.steps):
        raise NotApplicable("the metadata names no block in a form that the suite can read")
    return Evidence(looked_at=len(d.steps), unit="steps")


@case("KV-META-003", variants=endings, rig="scheduler")
def freed_blocks_are_in_no_order(rig: Rig, ending: Ending) -> Evidence:
    """After a request has ended and vLLM has freed its blocks, no metadata names it with these blocks.

    They would be loaded, sent or saved while they belong to another request.
    """
    side, id, sides = run_to_end(rig, ending)
    for _ in range(2):
        side.step()  # an order may be repeated until it is reported
    report_all(*sides)
    _require_no_order(rig, side, id)
    return Evidence(looked_at=len(side.steps), unit="steps")


def _require_no_order(rig: Rig, side: Side, id: str) -> None:
    """Raise Violation if one of the next steps names a request that has ended, and blocks that it had.

    In the later ones another request runs. The metadata may name the blocks that it has.
    """
    theirs, other = frozenset[int](), ""
    for number in range(LATER_STEPS):
        if number == IDLE_STEPS:
            other = side.add(rig.prompt(token_count(PROMPT, side.block_size), seed=1), max_tokens=LATER_STEPS)
        step = side.step()
        if other:
            theirs = frozenset(block for group in side.blocks(other) for block in group)
        if wrong := sorted((side.blocks_had(id) - theirs) & step.block_ids_for(id)):
            raise rig.violation(
                "",
                f"{id} has ended and its blocks are free, and the metadata of step {step.number} names it "
                f"with its blocks {wrong}",
                diagnosis="an order outlives its request: the next request that gets these blocks suffers",
            )


@case("KV-META-004", variants=first_in_quick("prefill", "decode"), rig="scheduler")
def metadata_does_not_change_after_its_step(rig: Rig, role: str) -> Evidence:
    """The metadata of a step does not change afterwards.

    Workers may still read it when the next step is made.
    """
    needs_hand_over(rig)
    p, d = rig.side("P"), rig.side("D")
    prompts = [rig.prompt(token_count(PROMPT, d.block_size), seed=seed) for seed in range(2)]
    for prompt in prompts:
        rig.hand_over(p, d, prompt)
    d.run()
    report_all(p)
    p.step()
    side = p if role == "prefill" else d
    looked = 0
    for step in side.steps:
        now, then = _named(side, step.metadata_object), _named(side, step.metadata)
        looked += len(then)
        if now != then:
            raise rig.violation(
                "",
                f"the metadata of step {step.number} named {', '.join(then)} and names "
                f"{', '.join(now) or 'nothing'} now",
            )
    if not looked:
        raise NotApplicable(
            "the metadata names neither blocks nor requests in a form that the suite can read"
        )
    return Evidence(looked_at=looked, unit="names")


def _named(side: Side, metadata: object) -> list[str]:
    """Return the blocks and requests of a side that are in the metadata."""
    values = [value for _, value in walk(metadata)]
    blocks = sorted({value for value in values if isinstance(value, int) and side.owns_block(value)})
    return [
        *(f"block {block}" for block in blocks),
        *sorted({value for value in values if isinstance(value, str) and value in side.prompts}),
    ]
