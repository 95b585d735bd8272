"""request_finished: what a connector does when a request ends, in whatever way and state."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, NotApplicable
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scheduler.leaks import integers
from pytest_kvconform.rigs.scheduler.own_workers.memory import Ending, require_bounded_memory
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.scheduler.store_engine import start_engine_with_worker
from pytest_kvconform.suite.protocol._scenarios import (
    ENDED_PREFILLS,
    ENDINGS,
    FINISHED_PREFILLS,
    PROMPT,
    endings,
    first_in_quick,
    needs_hand_over,
    report_all,
    run_to_end,
    token_count,
)

ENDED = "request_finished"
# Seconds in which a worker half reports an aborted prefill that it still wrote; times --kv-timeout-scale.
DRAIN_S = 4.0
# Behind a hit in D's prefix cache, after a load that failed, and after a preemption.
MORE_ENDINGS = (Ending("d", "hit"), Ending("d", "failed"), Ending("d", "preempted"))


def _ends(*sides: Side) -> Evidence:
    return Evidence(looked_at=sum(len(side.calls_of(ENDED)) for side in sides), unit="ends")


@case("KV-FINISH-001", variants=endings, rig="scheduler")
def returns_bool_and_params(rig: Rig, ending: Ending) -> Evidence:
    """At every end request_finished returns (bool, dict or None)."""
    _, _, sides = run_to_end(rig, ending)
    return _ends(*sides)


@case("KV-FINISH-002", variants=first_in_quick(*FINISHED_PREFILLS), rig="scheduler")
def params_survive_json(rig: Rig, ending: Ending) -> Evidence:
    """JSON does not change the params that P returns, and D accepts them after JSON."""
    needs_hand_over(rig)
    p, p_id, _ = run_to_end(rig, ending)
    params, d = p.kv_transfer_params(p_id), rig.side("D")
    d_id = d.add(p.prompts[p_id], params)
    d.run()
    if d.results[d_id].finish != "length":
        raise rig.violation(
            "", f"with P's params, after JSON, D's request ends with {d.results[d_id].finish!r}"
        )
    report_all(p)
    return Evidence(looked_at=len(params), unit="params", external_tokens=d.matched_tokens(d_id)[0])


@case("KV-FINISH-003", variants=first_in_quick(*ENDINGS), rig="scheduler")
def every_block_is_freed(rig: Rig, ending: Ending) -> Evidence:
    """However and wherever a request ends, no block or request is left in the scheduler.

    This holds when the workers have reported everything.
    """
    _, _, sides = run_to_end(rig, ending)
    report_all(*sides)
    rig.require_no_leaks(*sides)
    return _ends(*sides)


@case("KV-FINISH-003", variants=first_in_quick(*ENDINGS, *MORE_ENDINGS), rig="scheduler")
def memory_of_ended_requests_is_bounded(rig: Rig, ending: Ending) -> Evidence:
    """However requests end, the connector does not remember ever more of them.

    If it remembers anything of one request after its end, many more requests end in the same way.
    """
    sides = _end_one(rig, ending, ())
    ends = _ends(*sides)
    require_bounded_memory(rig, sides, lambda: _end_one(rig, ending, sides), ending)
    return ends


def _end_one(rig: Rig, ending: Ending, sides: tuple[Side, ...]) -> tuple[Side, ...]:
    """Bring one request to its end, let the workers report everything, and let them know of the end."""
    _, _, sides = (_end_on_d if ending in MORE_ENDINGS else run_to_end)(rig, ending, sides)
    report_all(*sides)
    for side in sides:
        side.step()
    return sides


def _end_on_d(rig: Rig, ending: Ending, sides: tuple[Side, ...]) -> tuple[Side, str, tuple[Side, ...]]:
    """Further ways on which a request of D comes to its end: see MORE_ENDINGS."""
    needs_hand_over(rig)
    p, d = sides or (rig.side("P"), rig.side("D", policy="recompute"))
    prompt = rig.prompt(token_count(PROMPT, d.block_size))
    if ending.how == "hit":
        d.warm_prefix_cache(prompt, d.block_size)
    _, id = rig.hand_over(p, d, prompt, max_tokens=3)
    rig.step_until_matched(d, id)
    if ending.how == "failed" and d.waits_for_remote_kv(id):
        d.step(failed=[id])
    elif ending.how == "preempted":
        d.run(lambda: d.status(id) == "RUNNING")
        d.preempt(id)
    d.run()
    return d, id, (p, d)


@case("KV-FINISH-003", variants=first_in_quick("length+abort", "abort+stop", "stop+length"), rig="scheduler")
def requests_that_end_together_are_all_freed(rig: Rig, ends: str) -> Evidence:
    """Several requests that end in one step, or between two steps, leave nothing.

    The workers learn of it in a step without a token.
    """
    p, ids = rig.side("P"), {}
    for seed, how in enumerate(ends.split("+")):
        prompt = rig.prompt(token_count(PROMPT, p.block_size), seed=seed)
        ids[
            p.add(
                prompt,
                rig.prefill_params() or None,
                max_tokens=1 if how == "length" else 3,
                stop=how == "stop",
            )
        ] = how
    p.step()
    for id, how in ids.items():
        if how == "abort":
            p.abort(id)
    p.run()
    report_all(p)
    rig.require_no_leaks(p)
    return _ends(p)


@case(
    "KV-FINISH-004",
    variants=first_in_quick(*ENDED_PREFILLS),
    rig="scheduler",
)
def aborted_prefill_is_freed_at_once(rig: Rig, ending: Ending) -> Evidence:
    """Nobody reads a prefill that P did not finish: its blocks are free at once, or soon if writes are under
    way, and no params name them.
    """
    needs_hand_over(rig)
    p, id, _ = run_to_end(rig, ending)
    [call] = p.calls_of(ENDED, id)
    if call.result[0]:
        _require_workers_to_report(rig, ending)
        report_all(p)
    if call.result[1] and any(map(p.owns_block, integers(call.result[1]))):
        raise rig.violation(
            "",
            f"for a prefill that ended as {call.arguments['status']} {call.hook} returned params that name "
            "its blocks",
        )
    if p.free_blocks() != p.free_blocks_at_start:
        raise rig.violation(
            "",
            f"{p.free_blocks_at_start - p.free_blocks()} blocks are not free although the prefill ended as "
            f"{call.arguments['status']}",
        )
    return Evidence(looked_at=1, unit="ends")


def _require_workers_to_report(rig: Rig, ending: Ending) -> None:
    """For an aborted prefill request_finished returned True, because writes may be under way. Abort one on an
    engine with a real worker half, and raise Violation unless the worker reports it soon.
    """
    p = start_engine_with_worker(rig)
    _, id, _ = run_to_end(rig, ending, (p,))
    [call] = p.calls_of(ENDED, id)
    for _ in rig.waits(Deadline(patience := rig.scaled_seconds(DRAIN_S))):
        if not call.result[0] or id not in p.delayed_free_requests():
            break
        p.step()
    if id in p.delayed_free_requests():
        raise rig.violation(
            "",
            f"for a prefill that ended as {call.arguments['status']} {call.hook} returned True: P keeps "
            f"blocks that no peer reads, and in {patience:g} s the worker half has not reported them as sent",
            diagnosis="P keeps the blocks of prefills that nobody will ask for",
        )


@case(
    "KV-FINISH-005",
    variants=first_in_quick("one_go", "chunked", "preempted", "preempted_at_the_end", "two_tokens"),
    rig="scheduler",
)
def params_name_the_final_blocks(rig: Rig, way: str) -> Evidence:
    """The params name the blocks that P has at the end, whatever blocks it had before."""
    needs_hand_over(rig)
    p = rig.side("P")
    p.scatter_free_blocks()  # the params may name blocks as runs
    prompt = rig.prompt(token_count(PROMPT, p.block_size))
    id = p.add(prompt, rig.prefill_params(), max_tokens=2 if way == "two_tokens" else 1)
    before: set[int] = set()
    if way in ("chunked", "preempted", "preempted_at_the_end"):
        p.set_token_budget(p.block_size)
        p.run(
            lambda: (
                p.status(id) == "RUNNING"
                and (
                    way != "preempted_at_the_end"
                    or p.num_computed_tokens(id) > len(prompt) - p.block_size - 6
                )
            )
        )
        before = {block for group in p.blocks(id) for block in group}
    if way.startswith("preempted"):
        p.preempt(id)
        p.run(lambda: p.status(id) == "PREEMPTED")
        p.set_token_budget(1 << 12)
        p.evict_prefix_cache()
        p.add(rig.prompt(2 * p.block_size, seed=1), max_tokens=40)  # takes blocks that the request had before
        p.step()
    p.run(lambda: id in p.results)
    [call] = p.calls_of(ENDED, id)
    named = frozenset(filter(p.owns_block, integers(p.kv_transfer_params(id))))
    owned = {block for group in call.arguments["blocks"] for block in group} - {0}
    if not named:
        raise NotApplicable("the params name no block in a form that the suite can read")
    if wrong := sorted(named - owned):
        older = " (it had them before it was preempted)" if set(wrong) & before else ""
        raise rig.violation(
            "",
            f"the params name blocks {wrong}, which are none of {sorted(owned)} that P had at the end{older}",
        )
    # P need not hand over what D computes anyway, such as the tokens behind the last whole block
    d = rig.side("D")
    rig.step_until_matched(d, d_id := d.add(prompt, p.kv_transfer_params(id)))
    loaded = d.first_external_tokens(d_id) or len(prompt)
    due = {
        block
        for group in p.full_attention_groups()
        for block in call.arguments["blocks"][group][: -(-loaded // p.group_sizes[group])]
    }
    if missing := sorted(due - named):
        raise rig.violation(
            "",
            f"D loads {loaded} tokens, which are in blocks {sorted(due)} of P, and the params leave out "
            f"blocks {missing}",
        )
    return Evidence(looked_at=len(named), unit="blocks")


@case("KV-FINISH-006", variants=first_in_quick(*FINISHED_PREFILLS), rig="scheduler")
def handed_over_blocks_are_kept_until_sent(rig: Rig, ending: Ending) -> Evidence:
    """P keeps blocks that params name until the workers report them as sent, and frees them then."""
    needs_hand_over(rig)
    p, id, _ = run_to_end(rig, ending)
    named = frozenset(filter(p.owns_block, integers(p.kv_transfer_params(id))))
    if not named:
        raise NotApplicable("the params name no block in a form that the suite can read")
    other = p.add(rig.prompt(p.block_size * 2, seed=1), max_tokens=3)
    p.run(lambda: p.status(other) == "RUNNING")
    theirs = {block for group in p.blocks(other) for block in group}
    [call] = p.calls_of(ENDED, id)
    owned = {block for group in call.arguments["blocks"] for block in group}
    if lost := sorted(named & (theirs | (owned & p.unused_blocks()))):  # it may hold them in vLLM's pool
        raise rig.violation(
            "",
            f"the params name blocks {sorted(named)}, and P freed {lost} before any peer has read them",
        )
    p.abort(other)
    report_all(p)
    rig.require_no_leaks(p)
    return Evidence(looked_at=len(named), unit="blocks")
