"""Scenarios with which cases on the scheduler rig begin.

They are about prompts, ends of requests, mixed requests, and notifications of P.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from model_matrix import load_geometries
from model_matrix.geometries import SlidingWindow, State
from pytest_kvconform.result import Cell, NotApplicable
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster
from pytest_kvconform.rigs.engine.objects import mentions, walk
from pytest_kvconform.rigs.scheduler.leaks import integers
from pytest_kvconform.rigs.scheduler.own_workers.memory import STATUS, Ending
from pytest_kvconform.rigs.scheduler.rig import Rig, Side, Step

Variant = TypeVar("Variant")
_LENGTH = re.compile(r"(?:(?P<times>\d*)b)?(?P<rest>[+-]?\d+)?")


def lengths(cell: Cell, matrix: str) -> list[str]:
    """Lengths of one token, and on both sides of block boundaries.

    They are in blocks, since the scheduler sets the block size.
    """
    short = ["1", "2", "b-1", "b", "b+1", "2b"]
    return short if matrix == "quick" else [*short, "2b-1", "2b+1", "3b-1", "3b", "3b+1"]


def token_count(length: str, block: int) -> int:
    """Return the number of tokens of a length: token_count("2b+1", 16) is 33."""
    match = _LENGTH.fullmatch(length)
    assert match is not None, length
    times = 0 if match["times"] is None else int(match["times"] or 1)
    return times * block + int(match["rest"] or 0)


PROMPT = "3b+5"  # several blocks, the last one partly filled

FINISHED_PREFILLS = (Ending("p", "length"), Ending("p", "stop"))
ENDED_PREFILLS = (
    Ending("p", "abort", "new"),
    Ending("p", "abort", "waiting"),
    Ending("p", "abort", "running"),
    Ending("p", "error", "running"),
)
DECODES = (
    Ending("d", "length"),
    Ending("d", "stop"),
    Ending("d", "abort", "new"),
    Ending("d", "abort", "waiting"),
    Ending("d", "abort", "loading"),
    Ending("d", "error", "loading"),
    Ending("d", "abort", "running"),
)
PLAIN = (Ending("plain", "length"), Ending("plain", "abort", "waiting"), Ending("plain", "abort", "running"))
ENDINGS = (*PLAIN, *FINISHED_PREFILLS, *ENDED_PREFILLS, *DECODES)
FEW = (
    Ending("p", "length"),
    Ending("d", "abort", "loading"),
    Ending("plain", "length"),
    Ending("p", "abort", "running"),
)


def needs_hand_over(rig: Rig | Cluster) -> None:
    """Raise NotApplicable for a store, which hands nothing from one engine to another."""
    if rig.subject.is_store:
        raise NotApplicable(
            f"{rig.subject.connector} is a store: it hands no request from one engine to another"
        )


def names_blocks_of_loads_only(rig: Rig) -> bool:
    """Whether the metadata names no block of a request that loads nothing.

    A connector may save such blocks. A load cannot be recognized then.
    """
    d = rig.side("D")
    d.add(rig.prompt(token_count(PROMPT, d.block_size)), max_tokens=3)
    return not any(
        map(d.owns_block, (number for step in (d.step(), d.step()) for number in integers(step.metadata)))
    )


def needs_metadata_of_loads_only(rig: Rig) -> None:
    """Raise NotApplicable if the metadata also names blocks of requests that load nothing."""
    if not names_blocks_of_loads_only(rig):
        raise NotApplicable(
            "the metadata also names the blocks of a request that loads nothing, so a load cannot be "
            "recognized"
        )


def first_in_quick(*variants: Variant) -> Callable[[Cell, str], tuple[Variant, ...]]:
    """Variants for every cell.

    In the quick matrix, models of several KV cache groups have the first variant alone.
    """
    return lambda cell, matrix: variants if matrix != "quick" or one_group(cell) else variants[:1]


def endings(cell: Cell, matrix: str) -> tuple[Ending, ...]:
    """Variants: every way to end a request. The quick matrix has a few of them."""
    return ENDINGS if matrix != "quick" else FEW if one_group(cell) else FEW[:2]


def one_group(cell: Cell) -> bool:
    """Whether every layer has the same kind of KV cache, so that the model has one KV cache group."""
    return not any(
        isinstance(kind, (SlidingWindow, State)) for kind in load_geometries()[cell.family].kinds.values()
    )


def run_to_end(rig: Rig, ending: Ending, sides: tuple[Side, ...] = ()) -> tuple[Side, str, tuple[Side, ...]]:
    """Bring one request to its end.

    Returns its side, its id, and all sides. Blocks that are kept stay kept, and loads stay under way.
    `sides`: those of an earlier call, to repeat it on them.
    """
    how, state = ending.how, ending.state
    p = sides[0] if sides else rig.side("P")
    if ending.whose == "d":
        needs_hand_over(rig)
        d = sides[1] if sides else rig.side("D")
        prompt = rig.prompt(token_count(PROMPT, d.block_size))
        _, id = rig.hand_over(p, d, prompt, max_tokens=3, stop=how == "stop")
        side, sides = d, (p, d)
    else:
        side, sides = p, (p,)
        prompt = rig.prompt(token_count(PROMPT, p.block_size))
        id = p.add(
            prompt,
            rig.prefill_params() if ending.whose == "p" else None,
            max_tokens=1 if how == "length" else 3,
            stop=how == "stop",
        )
    if not state:
        side.run(lambda: id in side.results)
    elif state == "new":
        side.abort(id, STATUS[how])
    elif state == "waiting":
        side.take_all_free_blocks()
        side.step()
        side.abort(id, STATUS[how])
        side.return_taken_blocks()
    elif state == "loading":
        rig.start_loads(side, id)
        side.abort(id, STATUS[how])
    else:
        side.set_token_budget(side.block_size)
        side.run(lambda: side.status(id) == "RUNNING")
        side.abort(id, STATUS[how])
    return side, id, sides


def run_mixed_requests(rig: Rig, role: str) -> Side:
    """Run requests of every kind at once on a side of this role.

    One has a prefix in the prefix cache, one is preempted, one is aborted, and prompts are computed in
    chunks; on D two are handed over. Returns the side, on which all requests have ended.
    """
    p = side = rig.side("P")
    if role == "D":
        needs_hand_over(rig)
        side = rig.side("D")
    prompts = [rig.prompt(token_count(PROMPT, side.block_size), seed=seed) for seed in range(4)]
    side.warm_prefix_cache(prompts[0], 2 * side.block_size)
    if role == "D":
        ids = [rig.hand_over(p, side, prompt, max_tokens=3)[1] for prompt in prompts[:2]]
        ids += [side.add(prompt, max_tokens=3) for prompt in prompts[2:]]
    else:
        ids = [side.add(prompt, rig.prefill_params() or None, max_tokens=3) for prompt in prompts]
    side.set_token_budget(2 * side.block_size)
    side.run(lambda: side.status(ids[2]) == "RUNNING")
    side.preempt(ids[2])
    side.run(lambda: bool(side.steps[-1].preempted))
    side.abort(ids[3])
    side.run()
    report_all(*dict.fromkeys((p, side)))
    side.step()
    return side


def report_all(*sides: Side) -> None:
    """Let the workers report everything that is still kept.

    Loads of aborted requests are reported as received, the others as sent.
    """
    for side in sides:
        loading = [id for id in side.delayed_free_requests() if side.finished_while_loading(id)]
        side.step(received=loading, sent=[id for id in side.delayed_free_requests() if id not in loading])


SHORTEST = 8  # word that can identify one engine or one request
SAME = "cmpl-same-0000"  # id of D's request on both sides that are compared


def identifiers(p: Side, id: str) -> frozenset[str]:
    """Return the words that can be recognized in metadata: ids of P's engine and of its request."""
    told = walk(p.telling_params(id))
    return frozenset(value for _, value in told if isinstance(value, str) and len(value) >= SHORTEST)


def places(steps: list[Step], names: frozenset[str]) -> frozenset[str]:
    """Return where in the metadata of these steps the identifiers are."""
    return frozenset(place for step in steps for name in names for place in mentions(step.metadata, name))


def places_while_waiting(d: Side, p: Side, id: str) -> frozenset[str]:
    """Return where P's identifiers are as long as D has no block for its request. `id`: P's request.

    They may be in renewals of a lease. The side cannot be used afterwards.
    """
    d.take_all_free_blocks()
    d.add(p.prompts[id], p.kv_transfer_params(id), id=SAME)
    d.rig.step_until_matched(d, SAME)
    d.step()
    return places(d.steps, identifiers(p, id))


def notifies_p(d: Side, names: frozenset[str], waiting: frozenset[str]) -> bool:
    """Whether the metadata of a step of D orders a notification to P, now or while vLLM steps D on.

    A connector is free to choose the form. But the metadata then names P's request in a place where the
    request is not as long as it waits (`waiting`).
    """
    return not places(d.steps, names) <= waiting or d.rig.steps_on(
        d, lambda: not places(d.steps[-1:], names) <= waiting
    )


def wrong_reload(p: Side, d: Side, names: frozenset[str], waiting: frozenset[str]) -> str:
    """Return what is wrong with a second load of request SAME of D, whose first load has succeeded, or "".
    All requests of D have ended. vLLM steps D on while something is wrong, as `Rig.steps_on`.

    A second load may read what D's connector has saved itself, or what P still keeps. P keeps its blocks if
    D's metadata notifies P only later. P has freed them if it is notified before the second load, or never:
    then the first load itself was the notification.
    """
    d.rig.steps_on(d, lambda: not _wrong_reload(p, d, names, waiting))
    return _wrong_reload(p, d, names, waiting)


def _wrong_reload(p: Side, d: Side, names: frozenset[str], waiting: frozenset[str]) -> str:
    calls = d.calls_of("update_state_after_alloc", SAME)
    begun = [call.step for call in calls if call.arguments["num_external_tokens"]]
    orders = [_order(d, begin, end) for begin, end in zip(begun, [*begun[1:], len(d.steps) + 1], strict=True)]
    loading = waiting | places([step for order in orders for step in order], names)
    notified = [step.number for step in d.steps if not places([step], names) <= loading]
    for number, order in zip(begun[1:], orders[1:], strict=True):
        if orders[0] and not order:
            return f"announced a second load in step {number}, and no load is ordered: the request would wait"
        named = {block for step in order for block in step.block_ids_for(SAME)}
        if not any(map(p.owns_block, named)) and places(order, names) <= waiting:
            continue  # not from P
        if not notified or notified[-1] <= number:
            return f"announced a second load in step {number}, from blocks that P has freed"
        if notified[0] < number:
            return f"announced a second load in step {number}, and P was notified in step {notified[0]}"
    return ""


def _order(d: Side, begin: int, end: int) -> list[Step]:
    """Return the first step from `begin` on, before `end`, that orders a load of request SAME; none: []."""
    steps = d.steps[begin - 1 : end - 1]
    return [step for step in steps if any(map(d.owns_block, step.block_ids_for(SAME)))][:1]


def require_no_order_yet(rig: Rig, d: Side, id: str) -> None:
    """Raise Violation if the metadata of a step orders a load for a request that has no block yet.

    Metadata that names the request may order loads of other requests, into their blocks.
    """
    others = frozenset(block for other in d.prompts if other != id for block in d.blocks_had(other))
    for step in d.steps:
        if ordered := sorted(filter(d.owns_block, step.block_ids_for(id) - others)):
            raise rig.violation(
                "",
                f"step {step.number} orders a load into blocks {ordered} for {id}, which has no block yet",
                diagnosis="get_num_new_matched_tokens orders a load, instead of update_state_after_alloc",
            )


def require_no_order(rig: Rig, d: Side, id: str, since: int = 0) -> None:
    """update_state_after_alloc got 0 tokens for a request. Raise Violation if a step of D after the first
    `since` ones orders a load for it.
    """
    for step in d.steps[since:]:
        if blocks := sorted(filter(d.owns_block, step.block_ids_for(id))):
            raise rig.violation(
                "", f"update_state_after_alloc got 0 tokens, and the metadata names blocks {blocks} for {id}"
            )


def require_d_loads_no_more(rig: Rig, p: Side, id: str, computed: int) -> None:
    """P's prompt was cut to `computed` tokens after a preemption. Raise Violation if D loads more of it."""
    d = rig.side("D")
    d_id = d.add(p.prompts[id], p.kv_transfer_params(id))
    rig.step_until_matched(d, d_id)
    if (loaded := d.first_external_tokens(d_id)) > computed:
        raise rig.violation(
            "",
            f"after a preemption a prompt of {len(p.prompts[id])} tokens was cut to {computed}, and D loads "
            f"{loaded}",
            diagnosis="P cuts a prompt again after a preemption, and D does not know of it",
        )
    d.run()


def was_computed(side: Side, id: str) -> bool:
    """Whether a side computed a request to its end."""
    ended, computed = side.results.get(id), side.locally_computed_tokens(id)
    return ended is not None and ended.finish == "length" and computed == len(side.prompts[id])
