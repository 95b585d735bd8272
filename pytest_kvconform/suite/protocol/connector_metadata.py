"""build_connector_meta: the metadata that a connector sends to its workers in each step."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, HarnessError, NotApplicable
from pytest_kvconform.rigs.scheduler.leaks import walk
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


def _situations(cell: Cell, matrix: str) -> tuple[str, ...]:
    return ("empty", *endings(cell, matrix))


@case("KV-META-001", variants=_situations, rig="scheduler")
def metadata_survives_pickle(rig: Rig, situation: str) -> Evidence:
    """In every step build_connector_meta returns a KVConnectorMetadata that survives pickle.

    This holds for empty steps, too. The recorder checks each step.
    """
    if situation == "empty":
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
def load_is_in_one_step_only(rig: Rig, situation: str) -> Evidence:
    """The blocks that a load fills are in the metadata of one step only."""
    needs_hand_over(rig)
    needs_metadata_of_loads_only(rig)
    p, d = rig.side("P"), rig.side("D")
    prompt = rig.prompt(1 if situation == "one_token" else token_count(PROMPT, d.block_size))
    if situation == "hit":
        d.warm_prefix_cache(prompt, d.block_size)
    _, d_id = rig.hand_over_and_load(p, d, prompt, max_tokens=2)
    for _ in range(3):
        d.step()
    d.run()
    steps = [step.number for step in d.steps if any(map(d.owns_block, step.block_ids_for(d_id)))]
    if not steps:
        raise NotApplicable("the metadata names no block in a form that the suite can read")
    if len(steps) > 1:
        raise rig.violation(
            "", f"the load of {d_id} is ordered in steps {steps}: a load must be ordered once"
        )
    return Evidence(looked_at=len(d.steps), unit="steps")


@case("KV-META-003", variants=endings, rig="scheduler")
def finished_request_is_in_one_step_only(rig: Rig, ending: str) -> Evidence:
    """After its end a request is in the metadata of one step at most.

    There it is to be sent, to be given up, or to notify P.
    """
    side, id, sides = run_to_end(rig, ending)
    last = len(side.steps)
    steps = [step.number for step in [side.step() for _ in range(4)] if step.mentions(id)]
    if len(steps) > 1:
        raise rig.violation(
            "",
            f"{id} ended before step {last + 1}, and the metadata of steps {steps} mentions it: the state of "
            "a step is not reset",
        )
    report_all(*sides)
    return Evidence(looked_at=4, unit="steps")


@case("KV-META-003", rig="scheduler")
def idle_step_mentions_no_request(rig: Rig, variant: None) -> Evidence:
    """The metadata of a second step in which nothing happens mentions no request."""
    needs_hand_over(rig)
    p, d = rig.side("P"), rig.side("D")
    p_id, d_id = rig.hand_over_and_load(p, d, rig.prompt(token_count(PROMPT, d.block_size)))
    p.step()
    for side, id in ((p, p_id), (d, d_id)):
        if (again := side.step()).mentions(id):
            raise rig.violation(
                "",
                f"nothing happened in step {again.number} of {side.name}, and its metadata still mentions "
                f"{id}",
            )
    return Evidence(looked_at=2, unit="steps")


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
