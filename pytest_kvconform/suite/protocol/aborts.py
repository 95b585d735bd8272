"""Aborts of D's requests, in every state in which they can be."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, Violation
from pytest_kvconform.rigs.context import declared_amount
from pytest_kvconform.rigs.scheduler.leaks import is_opaque
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.scheduler.store_engine import workers_hear_of_ends
from pytest_kvconform.suite.protocol._scenarios import (
    PROMPT,
    first_in_quick,
    needs_hand_over,
    token_count,
)

ENDED = "request_finished"
ALL_WHOLE_BLOCKS = "KV-HANDOVER-003"
STATES = ("waiting", "asked", "begun", "loading", "loaded", "failed", "running", "preempted")


@case("KV-ABORT-001", variants=first_in_quick(*STATES), rig="scheduler")
def abort_leaves_other_requests_alone(rig: Rig, state: str) -> Evidence:
    """D aborts one of two requests.

    The other request loads and ends as without the abort. A connector that begins no load beside another one
    loads the next request. The report of the first load may come late, and nothing is left.
    """
    needs_hand_over(rig)
    p, d = rig.side("P"), rig.side("D", policy="recompute")
    prompts = [rig.prompt(token_count(PROMPT, d.block_size), seed=seed) for seed in range(2)]
    _, alone = rig.hand_over_and_load(p, twin := rig.side("D"), prompts[1])
    _, id = rig.hand_over(p, d, prompts[0], max_tokens=4)
    _bring_to_state(d, id, state)
    _, other = rig.hand_over(p, d, prompts[1], max_tokens=2)
    loading = d.waits_for_remote_kv(id)
    d.abort(id)
    d.return_taken_blocks()
    ended = d.calls_of(ENDED, id)
    # Blocks of a load that is under way are kept in any case, until its end is reported.
    readable = any(step.mentions(alone) for step in twin.steps)
    if len(ended) != 1 or (ended[0].result[0] and not loading and not _workers_know(d, id, readable)):
        answers = " and ".join(f"{call.hook} returned {call.result}" for call in ended)
        raise rig.violation("", f"a request of D was aborted while {state}: {answers or 'it did not end'}")
    rig.step_until_matched(d, other)
    waits = d.match_is_pending(other)  # the connector may load one request after the other
    if not waits:
        d.run(lambda: other in d.results)
    if loading:
        if id not in d.delayed_free_requests():
            raise rig.violation("", f"the load of {id} was not reported, and its blocks are free")
        d.step(received=[id])  # late: unless it was waited for, the other request has come and ended
    d.run(lambda: other in d.results)
    computed, given = d.locally_computed_tokens(other), d.first_external_tokens(other)
    most = twin.first_external_tokens(alone)
    # After a load has failed, D may load nothing from its P for a while, with and without the abort.
    if given < most and state == "failed" and _loads_beside_another(rig, p, prompts, state) < most:
        most = given
    never = given < 1 <= most
    if never and loading and _loads_beside_another(rig, p, prompts) < 1:
        never = _loads_next(rig, p, d) < 1
    if d.results[other].finish != "length" or computed > max(1, len(prompts[1]) - given) or never:
        raise rig.violation(
            "",
            f"{id} was aborted while {state}, and {other}, which loaded {given} tokens, computed {computed}",
            differs=f"without the abort {most} of its {len(prompts[1])} tokens are loaded",
        )
    p.step(sent=p.delayed_free_requests())
    rig.require_no_leaks(p, d)
    if given < most and not declared_amount(rig.subject):  # a busy D may leave more to itself
        raise rig.violation(
            ALL_WHOLE_BLOCKS,
            f"{id} was aborted while {state}, and {other} loaded {given} tokens, but {most} where D had no "
            "other request",
        )
    return Evidence(looked_at=len(d.steps), unit="steps", external_tokens=given)


@case("KV-ABORT-001", rig="scheduler")
def abort_leaves_its_twin_alone(rig: Rig, variant: None) -> Evidence:
    """D aborts the first of two requests with the same prompt and the same params while it loads.

    The other one ends, whether it loads or has waited for what the first one brings. Nothing is left.
    """
    needs_hand_over(rig)
    p, d = rig.side("P"), rig.side("D", policy="recompute")
    prompt = rig.prompt(token_count(PROMPT, d.block_size))
    first, id = rig.hand_over_and_load(p, d, prompt, max_tokens=2)
    twin = d.add(prompt, p.kv_transfer_params(first), max_tokens=2)
    d.step()
    d.abort(id)
    d.step(received=[id] if id in d.delayed_free_requests() else ())
    try:
        d.run(lambda: twin in d.results)
    except Violation as broken:
        happened = f"{id} was aborted while it loaded, and {twin} has its params: {broken.finding.happened}"
        raise rig.violation("", happened, broken.finding.differs) from None
    if d.results[twin].finish != "length":
        raise rig.violation(
            "", f"{id} was aborted while it loaded, and {twin}, with its params, ended with {d.results[twin]}"
        )
    p.step(sent=p.delayed_free_requests())
    rig.require_no_leaks(p, d)
    return Evidence(looked_at=len(d.steps), unit="steps", external_tokens=d.first_external_tokens(twin))


def _loads_beside_another(rig: Rig, p: Side, prompts: list[tuple[int, ...]], state: str = "begun") -> int:
    """How many tokens another D loads of the second prompt while its load of the first one is under way, or
    has failed (`state`). A connector may load nothing then.
    """
    d = rig.side("D", policy="recompute")
    _, first = rig.hand_over(p, d, prompts[0], max_tokens=4)
    _bring_to_state(d, first, state)
    _, other = rig.hand_over(p, d, prompts[1], max_tokens=2)
    rig.step_until_matched(d, other)
    d.run()
    return d.first_external_tokens(other)


def _loads_next(rig: Rig, p: Side, d: Side) -> int:
    """How many tokens D loads of one more prompt, when none of its loads is under way."""
    _, id = rig.hand_over(p, d, rig.prompt(token_count(PROMPT, d.block_size), seed=2))
    rig.step_until_matched(d, id)
    d.run(lambda: id in d.results)
    return d.first_external_tokens(id)


def _workers_know(d: Side, id: str, readable: bool = False) -> bool:
    """Whether the workers know of the end of a request, so that they can report when its blocks are of no
    more use to them. Lets them report it as sent.

    The metadata after the end names it, or names requests in no form that can be read (`readable`: some
    metadata does), or the worker half of this connector reports the ends of which vLLM tells it. Or the
    metadata names it while vLLM steps D on.
    """
    readable = readable or any(step.mentions(name) for step in d.steps for name in d.prompts)
    step = d.step()
    named = step.mentions(id) or (not readable and is_opaque(step.metadata))
    told = named or (id in step.finished and workers_hear_of_ends(d.rig, d.role))
    if told := told or d.rig.steps_on(d, lambda: d.steps[-1].mentions(id)):
        d.step(sent=[id])
    return told


def _bring_to_state(d: Side, id: str, state: str) -> None:
    """Bring a request of D into a state. asked: no block is free; begun: it waits for remote KV; loading:
    some steps later; loaded: its load was reported.
    """
    if state == "waiting":
        return
    if state == "asked":
        d.take_all_free_blocks()
        d.step()
        return
    d.rig.step_until_matched(d, id)
    if state == "loading":
        d.step()
        d.step()
    elif state in ("loaded", "failed"):
        report = [id] if d.waits_for_remote_kv(id) else []
        d.step(failed=report) if state == "failed" else d.step(received=report)
    elif state != "begun":
        d.run(lambda: d.status(id) == "RUNNING")
        if state == "preempted":
            d.preempt(id)
            d.step()
