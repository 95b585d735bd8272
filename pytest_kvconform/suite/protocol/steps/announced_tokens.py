"""Tokens that get_num_new_matched_tokens announces, and that vLLM's scheduler drops or lets load later."""

from __future__ import annotations

from typing import Any

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, HarnessError, NotApplicable
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.vllm_setup import compat
from pytest_kvconform.suite.protocol._scenarios import (
    PROMPT,
    first_in_quick,
    needs_hand_over,
    needs_metadata_of_loads_only,
    report_all,
    require_no_order,
    token_count,
    was_computed,
)
from pytest_kvconform.suite.protocol.aborts import _workers_know

ASKED, PLACED, ENDED = "get_num_new_matched_tokens", "update_state_after_alloc", "request_finished"
TOKENS = 150  # that another request of D samples meanwhile
NO_SUCH_VLLM = "the plan has a case that this vLLM cannot be brought into"


@case("KV-MATCH-011", variants=first_in_quick("no_hit", "hit"), rig="scheduler")
def dropped_announcement_starts_no_load(rig: Rig, situation: str) -> Evidence:
    """The scheduler drops what a connector announces for a plain request. D computes the prompt."""
    needs_hand_over(rig)
    needs_metadata_of_loads_only(rig)
    p, d = rig.side("P"), rig.side("D")
    prompt = rig.prompt(token_count(PROMPT, d.block_size))
    if situation == "hit":
        d.warm_prefix_cache(prompt, d.block_size)
    _, id = rig.hand_over(p, d, prompt)
    if not compat.drop_announced_tokens(d.scheduler):
        raise HarnessError(NO_SUCH_VLLM)
    start = len(d.steps)
    rig.step_until_matched(d, id)
    counts = [call.arguments["num_external_tokens"] for call in d.calls_of(PLACED, id)]
    if not d.matched_tokens(id)[0] or counts != [0]:
        raise NotApplicable(f"{ASKED} returned {d.matched_tokens(id)}, and {PLACED} got {counts}")
    d.run()
    require_no_order(rig, d, id, start)
    if situation == "no_hit" and not was_computed(d, id):
        raise rig.violation(
            "",
            f"{PLACED} got 0 tokens, and D computed {d.locally_computed_tokens(id)} of {len(prompt)} tokens",
        )
    report_all(p, d)
    rig.require_no_leaks(p, d)
    return Evidence(looked_at=len(d.steps) - start, unit="steps")


@case("KV-MATCH-012", variants=first_in_quick("later", "never"), rig="scheduler")
def load_is_ordered_when_it_may_begin(rig: Rig, when: str) -> Evidence:
    """update_state_after_alloc comes after the step in which D's request was admitted, or never, because the
    request is aborted before.
    """
    needs_hand_over(rig)
    p, twin = rig.side("P"), rig.side("D")
    prompts = [rig.prompt(token_count(PROMPT, p.block_size), seed=seed) for seed in range(2)]
    _, alone = rig.hand_over_and_load(p, twin, prompts[0])
    rig.asynchronous = True
    d = rig.side("D")
    if not compat.defer_loads(d.scheduler):
        raise HarnessError(NO_SUCH_VLLM)
    other = d.add(rig.prompt(p.block_size, seed=2), max_tokens=TOKENS)
    d.run(lambda: d.status(other) == "RUNNING")
    _, id = rig.hand_over(p, d, prompts[1], max_tokens=2)
    looked_at = _later(rig, d, id, twin, alone) if when == "later" else _never(rig, d, id)
    d.abort(other)
    d.run()
    d.end_flight()
    twin.run()
    report_all(p, d)
    rig.require_no_leaks(p, d)
    return Evidence(looked_at=looked_at, unit="steps", external_tokens=d.first_external_tokens(id))


def _later(rig: Rig, d: Side, id: str, twin: Side, alone: str) -> int:
    """Raise Violation unless the load is ordered as it is if the call comes in the same step."""
    rig.start_loads(d, id)
    hooks = [call.hook for call in d.calls if call.request in (id, "")]
    if "build_connector_meta" not in hooks[hooks.index(ASKED) : hooks.index(PLACED)]:
        raise NotApplicable(f"no step was in flight when {ASKED} returned {d.matched_tokens(id)}")
    announced = d.matched_tokens(id)[0]
    if _ordered(twin, alone) and not _ordered(d, id):
        raise rig.violation(
            "",
            f"{PLACED} came a step after {ASKED} had announced {announced} tokens, and no step of "
            f"{len(d.steps)} orders the load: the request would wait for ever",
            diagnosis=f"what {ASKED} noted is lost when build_connector_meta has been called",
        )
    d.run(lambda: id in d.results)
    due = max(1, len(d.prompts[id]) - announced)
    if d.results[id].finish != "length" or d.locally_computed_tokens(id) > due:
        raise rig.violation(
            "",
            f"{PLACED} came a step after {ASKED}, and a request that loaded {announced} tokens computed "
            f"{d.locally_computed_tokens(id)} and ended with {d.results[id].finish!r}",
        )
    return len(d.steps)


def _never(rig: Rig, d: Side, id: str) -> int:
    """Abort the request before the call. Raise Violation unless it ends at once."""
    _abort_before_the_load(d, id)
    rig.step_until_matched(d, id)
    if d.calls_of(PLACED, id) or id not in d.finished:
        raise NotApplicable(f"{rig.subject.connector} begins no asynchronous load: {d.matched_tokens(id)}")
    [ended] = d.calls_of(ENDED, id)
    if ended.result[0] and not _workers_know(d, id):
        raise rig.violation(
            "",
            f"a request was aborted after {ASKED} had announced {d.matched_tokens(id)[0]} tokens and before "
            f"{PLACED}: {ended.hook} returned {ended.result}, and no worker knows the request",
            diagnosis="its load was never ordered, and nobody will report it",
        )
    return len(d.steps)


def _ordered(d: Side, id: str) -> bool:
    """Whether the metadata of a step names blocks of this side for a request."""
    return any(map(d.owns_block, (block for step in d.steps for block in step.block_ids_for(id))))


def _abort_before_the_load(d: Side, id: str) -> None:
    """Abort a request when its load is deferred, as EngineCore does between two steps."""
    update = d.scheduler.update_from_output

    def update_from_output(*args: Any) -> Any:
        if id in d.scheduler.deferred_loads:
            d.abort(id)
        return update(*args)

    d.scheduler.update_from_output = update_from_output
