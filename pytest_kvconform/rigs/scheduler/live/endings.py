"""What a scheduler half remembers of ended requests, where its own worker halves report.

The scripted workers of the scheduler rig cannot send what build_connector_worker_meta returns. A connector
may remember an ended request until its workers have reported there that they know of the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvconform.rigs.engine.router import RENDEZVOUS
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scheduler.connector_class import REPORTS, classes_with, require_standard_reports
from pytest_kvconform.rigs.scheduler.leaks import A_FEW, ENOUGH, LATER_S, growing_memory, mentions, remembered
from pytest_kvconform.rigs.scheduler.live.clocks import set_ahead
from pytest_kvconform.rigs.scheduler.rig import BLOCK, LEFT
from pytest_kvconform.rigs.scheduler.violations import RELEASES

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.live.engine import LiveEngine
    from pytest_kvconform.rigs.scheduler.live.pair import Live
    from pytest_kvconform.rigs.scheduler.rig import Rig
    from pytest_kvconform.rigs.scheduler.side import Side

SEVERAL = 16  # tokens that a request computes unless it is ended before; other engines let this one step, too
TIMES = 24  # requests that end before what is remembered is counted, and between
WINDOWS = 3  # in which a place may grow; so the memory of every third request is found
BLOCKS = 960  # of an engine: P may keep those of every request until a lease ends
AT_ONCE_S = 0.25  # in which a request with bad params ends by itself, as most do
STATUS = {"abort": "FINISHED_ABORTED", "error": "FINISHED_ERROR"}  # vLLM's RequestStatus


@dataclass(frozen=True)
class Ending:
    """How a request comes to its end. As a word of an id it is "p-abort-running"."""

    whose: str  # "p": it asks for a hand-over; "d": it has been handed over; "plain": it has no params
    # "length" or "stop": by itself; "abort" or "error": from outside; "hit", "failed" or "preempted": what
    # happens to a request of D before it ends by itself
    how: str
    state: str = ""  # in which it is ended from outside: "new", "waiting", "loading" or "running"

    def __str__(self) -> str:
        return "-".join(filter(None, (self.whose, self.how, self.state)))


def require_bounded_memory(
    rig: Rig, sides: tuple[Side, ...], repeat: Callable[[], object], ending: Ending
) -> None:
    """Raise Violation (KV-FINISH-003) if a connector remembers ever more requests that have ended: see
    `leaks.growing_memory`. `ending`: how they end.

    A connector with a build_connector_worker_meta of its own is wrong only where its memory also grows on
    live engines, whose workers call it.
    """
    growing = growing_memory(sides, repeat, rig.subject.remembers)
    for one in sides if growing else ():
        require_standard_reports(one)
    for side in sides:
        mine = {place: sentence for (where, place), sentence in growing.items() if where is side}
        if mine and classes_with(side, REPORTS):
            found = grow_with_own_workers(rig, ending, side.role, set(mine))
            mine = {place: sentence for place, sentence in mine.items() if place in found}
        for sentence in mine.values():
            diagnosis = "the connector keeps something of every request"
            raise rig.violation(LEFT, sentence, diagnosis=diagnosis)


def grow_with_own_workers(rig: Rig, ending: Ending, role: str, places: set[str]) -> set[str]:
    """Of these places in the scheduler half of P or D, those that name ever more requests that have ended,
    where both halves of the connector run. Each engine has one rank.

    `ending`: how requests end. `places`: as `leaks.remembered` names them. Those that another case of the
    cell has seen grow are not looked at again. Raises Blocked if the worker half cannot run on this machine.
    """
    from pytest_kvconform.rigs.scheduler.live.config import LiveSpec
    from pytest_kvconform.rigs.scheduler.live.pair import live_engines
    from pytest_kvconform.rigs.scheduler.store_engine import spare_port

    if known := places & _known(rig, role):
        return known
    memory, policy = rig.host.spec.memory, "recompute" if ending.how == "failed" else "fail"
    tokens = 3 * max(memory["P"].block, memory["D"].block) + 5
    p, d = (
        LiveSpec(
            name,
            number,
            spare_port(rig, name),
            BLOCKS,
            longest=-(-tokens // memory[name].block) + 2,
            policy=policy,
        )
        for number, name in enumerate("PD")
    )
    with live_engines(rig, p, d) as live:
        engine, owners = (live.p if role == "P" else live.d), itertools.count()

        def end_some(times: int) -> None:
            for owner in itertools.islice(owners, times):
                with rig.wait(rig.settle_s):
                    _end_one(live, ending, role, owner, rig.prompt(tokens, seed=owner))

        def count(steps: bool) -> dict[str, int]:
            for one in live.engines if steps else ():
                one.step()
            found: dict[str, int] = engine.do(_count)
            return found

        def forget_in_time() -> None:
            for one in live.engines:
                one.set_clock_ahead(2 * LATER_S, monotonic=True)  # `growing_memory` has set it once

        return _growing(rig, role, places, end_some, count, forget_in_time)


def grow_with_bad_params(rig: Rig, role: str, places: set[str], every: Iterator[dict[str, Any]]) -> set[str]:
    """Of these places, those that name ever more ended requests that had these params, on an engine of this
    role with a worker half. A request that does not end by itself at once is aborted.

    `places` are as in `grow_with_own_workers`, and Blocked is raised as there.
    """
    from pytest_kvconform.rigs.scheduler.store_engine import (
        end_engine_with_worker,
        spare_port,
        start_engine_with_worker,
    )

    if known := places & _known(rig, role):
        return known
    side = start_engine_with_worker(rig, port=spare_port(rig, role), role=role, blocks=BLOCKS)
    days = itertools.count(2)  # `growing_memory` has set the clock ahead once

    def pass_a_day() -> None:
        set_ahead(next(days) * LATER_S, monotonic=True)  # leases end of what no D reads
        for _ in rig.waits(Deadline(rig.scaled_seconds(AT_ONCE_S))):
            if not side.delayed_free_requests():
                break
            side.step()

    def end_some(times: int) -> None:
        for _ in range(times):
            id = side.add(rig.prompt(3 * BLOCK), next(every))
            for _ in rig.waits(Deadline(rig.scaled_seconds(AT_ONCE_S))):
                if id in side.results:
                    break
                side.step()
            if side.status(id) != "gone" and id not in side.finished:
                side.abort(id)
            side.step()
            side.forget_records()
        pass_a_day()

    def count(steps: bool) -> dict[str, int]:
        if steps:
            side.step()
        return remembered(side, kept=False)

    try:
        return _growing(rig, role, places, end_some, count, pass_a_day)
    finally:
        end_engine_with_worker(side)


def _growing(
    rig: Rig,
    role: str,
    places: set[str],
    end_some: Callable[[int], None],
    count: Callable[[bool], dict[str, int]],
    forget_in_time: Callable[[], None],
) -> set[str]:
    """Of these places, those that grow with the requests that `end_some` lets end. They are noted for the
    other cases of the cell.

    A memory that has a limit is right, as in `leaks.growing_memory`. So what has grown is looked at again
    while it names no more than it may, and a day later. `count`: place -> requests that it names, at once or
    after a further step.
    """
    may = max(ENOUGH, rig.subject.remembers)
    end_some(TIMES)
    for _ in range(WINDOWS):
        early = count(False)
        end_some(TIMES)
        found = _above(rig, places, early, count)
        if not any(number <= may for number in found.values()):
            break
        end_some(may)
    if not found:
        return set()
    early = {place: max(may, number - 1) for place, number in count(False).items()}
    forget_in_time()
    end_some(A_FEW)
    if places := set(_above(rig, set(found), early, count)):
        with rig.shared_file(f"{role}.grows").open("a") as file:
            file.write("".join(f"{place}\n" for place in places))
    return places


def _above(
    rig: Rig, places: set[str], early: dict[str, int], count: Callable[[bool], dict[str, int]]
) -> dict[str, int]:
    """Of these places, those that name more requests than before, even if engines step on for a while, and
    how many.
    """
    late = count(False)
    for _ in rig.waits(Deadline(rig.settle_s)):
        if not any(late.get(place, 0) > early.get(place, 0) for place in places):
            break
        late = count(True)
    return {place: late[place] for place in places if late.get(place, 0) > early.get(place, 0)}


def _known(rig: Rig, role: str) -> set[str]:
    """Places that another case of the cell has seen grow."""
    known = rig.shared_file(f"{role}.grows")
    return set(known.read_text().splitlines()) if known.exists() else set()


def _end_one(live: Live, ending: Ending, role: str, owner: int, prompt: tuple[int, ...]) -> None:
    """Bring one request to its end. If P's memory is looked at and a request of D is to end, D loads what P
    handed over: P does not see how a request of D ends.
    """
    if ending.whose == "d" and role == "P":
        ending = Ending("p", "length")
    how = ending.how
    tokens = 1 if how == "length" else 3 if how == "stop" else SEVERAL
    asked = live.rig.prefill_params() if ending.whose != "plain" else None
    if ending.whose != "d":
        id = live.p.add(prompt, owner, asked, max_tokens=tokens, stop=how == "stop")
        _bring_to_end(live, live.p, id, ending)
        if ending.whose == "p" and not ending.state and live.p.do(_has_params, id):
            _load(live, prompt, owner, id, max_tokens=1)
        live.settle(lambda: not live.p.kept(), RELEASES)
    else:
        like = live.p.add(prompt, owner, asked)
        live.settle(lambda: live.p.ended([like]), "prefills")
        if how == "hit":
            warm = live.d.add(prompt[: live.d.side.block_size], owner)
            live.settle(lambda: live.d.ended([warm]), "requests of D")
        id = _load(live, prompt, owner, like, max_tokens=tokens, stop=how == "stop", ends=False)
        _bring_to_end(live, live.d, id, ending)
        live.settle(lambda: not live.d.kept(), RELEASES)
    for one in live.engines:
        one.step()
        one.do(_forget)


def _load(live: Live, prompt: tuple[int, ...], owner: int, like: str, ends: bool = True, **more: Any) -> str:
    """Add a request to D with what P handed over, and let it end. Returns its id."""
    loads_from = live.p.spec.engine
    id: str = live.d.add(prompt, owner, live.p.params(like), loads_from=loads_from, like=like, **more)
    if ends:
        live.settle(lambda: live.d.ended([id]), "requests of D")
    return id


def _bring_to_end(live: Live, engine: Any, id: str, ending: Ending) -> None:
    """Let a request come to this end."""
    if ending.how == "failed":
        _fail_load(live, id)
    elif ending.how == "preempted":
        live.settle(lambda: engine.statuses().get(id) in (None, "RUNNING"), "requests of D")
        engine.do(_preempt, id)
    if ending.state == "running" and engine is live.d:
        live.settle(lambda: engine.statuses().get(id) in (None, "RUNNING"), "requests of D")
    if ending.state:
        engine.do(_end_from_outside, id, ending.how, ending.state)
    else:
        live.settle(lambda: engine.ended([id]), "requests")


def _fail_load(live: Live, id: str) -> None:
    """Let a request end whose load is reported as failed."""
    side, work = live.d.side, live.d.side.worker

    def work_and_fail(output: Any) -> Any:
        reported = work(output)
        own = getattr(reported, "kv_connector_worker_meta", None)  # update_connector_output may end the load
        if reported is not None and (id in (reported.finished_recving or ()) or mentions(own, id)):
            reported.failed_recving = {*(reported.failed_recving or ()), id}
        return reported

    side.worker = work_and_fail
    try:
        live.settle(lambda: live.d.ended([id]), "requests of D")
    finally:
        side.worker = work


# ---- what an engine does in its own process ----


def _count(engine: LiveEngine) -> dict[str, int]:
    """Place -> requests that have ended, and whose blocks are free, that the scheduler half names there."""
    return remembered(engine.side, kept=False)


def _has_params(engine: LiveEngine, id: str) -> bool:
    """Whether P hands a request over that has ended."""
    return bool(engine.side.returned_params(id)) or engine.rig.subject.handover == RENDEZVOUS


def _forget(engine: LiveEngine) -> None:
    """Drop the harness's records of steps, and empty the prefix cache."""
    engine.side.forget_records()


def _preempt(engine: LiveEngine, id: str) -> None:
    if engine.side.status(id) == "RUNNING":
        engine.side.preempt(id)


def _end_from_outside(engine: LiveEngine, id: str, how: str, state: str) -> None:
    """Abort a request, or end it with an error, in a state."""
    side = engine.side
    if state == "loading":
        _end_in_step_of_load(engine, id, how)
        return
    if state == "waiting":
        side.take_all_free_blocks()
        engine.step()
    elif state == "running":
        engine.set_token_budget(side.block_size)
        side.run(lambda: side.status(id) in ("RUNNING", "gone"))
    if side.status(id) != "gone":
        side.abort(id, STATUS[how])
    if state == "waiting":
        side.return_taken_blocks()


def _end_in_step_of_load(engine: LiveEngine, id: str, how: str) -> None:
    """End a request between the workers' step in which its load begins and update_from_output, as vLLM takes
    aborts (EngineCore.step). For the scheduler half the load is under way, though it may end in that step.
    """
    side, work = engine.side, engine.side.worker
    assert work is not None

    def work_and_end(output: Any) -> Any:
        reported = work(output)
        if side.status(id) not in ("WAITING", "gone"):
            side.abort(id, STATUS[how])
        return reported

    side.worker = work_and_end
    try:
        while side.status(id) == "WAITING" and not side.match_is_overdue(id):
            engine.step()
    finally:
        side.worker = work
