"""Leaks of the scheduler rig: what is left when every request has ended.

`leaks` looks at the scheduler and its block pool, `growing_memory` at what the connector's scheduler half
remembers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pytest_kvconform.rigs.engine.clocks import set_ahead
from pytest_kvconform.rigs.engine.objects import mentions, named, state_of, walk

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.side import Side
    from pytest_kvconform.rigs.scheduler.steps import Step

# Requests that a connector may remember after their ends, and for how long: see growing_memory.
ENOUGH, LATER_S, A_FEW, ROUNDS = 80, 86_400.0, 4, 10


def is_opaque(root: Any) -> bool:
    """Whether an object contains bytes or tensors, in which `walk` finds neither request nor block ids."""
    found = [False]

    def note(value: Any) -> bool:
        found[0] |= bool(isinstance(value, (bytearray, memoryview))) or type(value).__name__ == "Tensor"
        return False

    return any(isinstance(value, bytes) and value for _, value in walk(root, note)) or found[0]


def integers(root: Any) -> frozenset[int]:
    """Every int that stands in a list, tuple, set or array within an object.

    Block ids stand in such containers; sizes and ports do not.
    """
    return frozenset(
        value
        for path, value in walk(root)
        if isinstance(value, int) and not isinstance(value, bool) and path[-1:] == ("item",)
    )


def told_ends(side: Side) -> tuple[str, ...]:
    """Requests whose blocks the connector keeps though no peer reads them, as one that still saves them, and
    of whose end its workers know: they are to report them as sent. The metadata of a step since the end has
    named it, or the worker half of this connector reports what vLLM alone tells it (finished_req_ids).
    """
    kept = _kept_for_no_peer(side)
    named = {id for id, steps in kept.items() if any(mentions(step.metadata, id) for step in steps)}
    told = {id for id, steps in kept.items() if any(id in step.finished for step in steps)}
    scripted = side.worker is None and not _a_fake_keeps(side)
    if told - named and scripted and _workers_hear_of_ends(side):
        named |= told
    return tuple(id for id in kept if id in named)


def _workers_hear_of_ends(side: Side) -> bool:
    from pytest_kvconform.rigs.scheduler.store_engine import workers_hear_of_ends

    return workers_hear_of_ends(side.rig, side.role)


def _a_fake_keeps(side: Side) -> bool:
    """Whether a fake connector beside the subject keeps the blocks of every request."""
    return any(
        type(one).__name__ == "FakeConnector" and one.keeps
        for one in getattr(side.connector, "_connectors", ())
    )


def untold_ends(side: Side) -> tuple[str, ...]:
    """Such requests since whose end there was no step that could have told the workers."""
    return tuple(id for id, steps in _kept_for_no_peer(side).items() if not steps)


def goes_on(side: Side) -> bool:
    """Whether vLLM steps an engine without requests on, for another reason than a peer that reads."""
    return bool(side.worker or side.call_hook("has_pending_push_work") or _kept_for_no_peer(side))


def _kept_for_no_peer(side: Side) -> dict[str, list[Step]]:
    """Requests that request_finished keeps and that P does not hand over -> the steps since their end.

    None of a store: cases let its workers report each save.
    """
    if side.rig.subject.is_store or not (kept := side.delayed_free_requests()):
        return {}
    ends = {call.request: call.step for call in side.calls_of("request_finished") if call.result[0]}
    return {
        id: side.steps[ends[id] :]
        for id in kept
        if id in ends and not (side.role == "P" and id in side.with_params)
    }


def leaks(side: Side) -> tuple[str, ...]:
    """Sentences about what is left on a side on which no request lives any more."""
    scheduler, pool = side.scheduler, side.manager.block_pool
    left = []
    if scheduler.requests:
        left.append(f"the scheduler still knows {', '.join(sorted(scheduler.requests))}")
    queues = {
        "waiting": scheduler.waiting,
        "kv_holding_waiting": scheduler.kv_holding_waiting,
        "running": scheduler.running,
    }
    left += [
        f"{len(list(queue))} requests are in scheduler.{name}"
        for name, queue in queues.items()
        if list(queue)
    ]
    for name in ("finished_recving_kv_req_ids", "failed_recving_kv_req_ids"):
        if found := getattr(scheduler, name):
            left.append(f"scheduler.{name} holds {', '.join(sorted(found))}")
    if missing := side.free_blocks_at_start - pool.get_num_free_blocks():
        left.append(f"{missing} of {side.free_blocks_at_start} blocks were not freed")
    if held := [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]:
        left.append(f"blocks {', '.join(map(str, held[:8]))} still have owners")
    for index, manager in enumerate(side.manager.coordinator.single_type_managers):
        if owners := sorted(request for request, blocks in manager.req_to_blocks.items() if blocks):
            left.append(f"group {index} still has blocks of {', '.join(owners)}")
        if counted := sorted(getattr(manager, "num_cached_block", ())):
            left.append(f"group {index} still counts cached blocks of {', '.join(counted)}")
    return tuple(left)


def remembered(side: Side) -> dict[str, int]:
    """Place in the connector's scheduler half -> how many of the requests that have ended on this side are
    named there, see `objects.named`.
    """
    return named(state_of(side.connector), set(side.finished))


def growing_memory(
    sides: Iterable[Side], repeat: Callable[[], object], declared: int
) -> dict[tuple[Side, str], str]:
    """Places in connectors that remember ever more requests that have ended: side and place, as `remembered`
    names it -> a sentence. The worst comes first.

    `repeat` lets further requests come and end on these sides, as the ones before. A memory that has a limit
    is right, for example one that tells late messages about an ended request from nonsense. The limit may be
    a number of requests, up to ENOUGH or to `declared` (the setting `remembers`), or a time. So this looks
    for the greatest number of requests that each place has named during ENOUGH repetitions, repeats as many
    times again, and compares. What is declared is filled first. A connector may remember only some requests,
    so that its memory fills slowly. While any place names more requests than before, but no more than it may,
    this goes on, ROUNDS times at most.
    """
    sides, may = tuple(sides), max(ENOUGH, declared)
    if not any(map(remembered, sides)):
        return {}

    def again() -> None:
        for side in sides:
            side.forget_records()
        repeat()

    def most(times: int) -> Counter[tuple[Side, str]]:
        found: Counter[tuple[Side, str]] = Counter()
        for _ in range(times):
            again()
            found |= Counter({(side, place): n for side in sides for place, n in remembered(side).items()})
        return found

    for _ in range(declared):
        again()
    early, late = most(ENOUGH), most(ENOUGH)
    for _ in range(ROUNDS):
        if not any(late[where] <= may for where in late - early):
            break
        early, late = late, most(ENOUGH)
    if not late - early:
        return {}
    set_ahead(LATER_S, monotonic=True)  # a connector may forget requests after some time
    most(A_FEW)
    now = Counter({(side, place): n for side in sides for place, n in remembered(side).items()})
    growing = [(now[where], *where) for where, n in late.items() if max(early[where], may) < n <= now[where]]
    return {
        (side, place): f"the connector of {side.name} remembers ever more requests that have ended, {number} "
        f"of {len(side.finished)} by now: {place}"
        for number, side, place in sorted(growing, key=lambda one: -one[0])
    }
