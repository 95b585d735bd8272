"""What a scheduler half remembers of ended requests, where its own worker halves report.

The scripted workers of the scheduler rig cannot send what build_connector_worker_meta returns. A connector
may remember an ended request until its workers have reported there that they know of the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scheduler.leaks import growing_memory, remembered
from pytest_kvconform.rigs.scheduler.rig import BLOCK, LEFT

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.live.engine import LiveEngine
    from pytest_kvconform.rigs.scheduler.live.pair import Live
    from pytest_kvconform.rigs.scheduler.rig import Rig
    from pytest_kvconform.rigs.scheduler.side import Side

SEVERAL = 16  # tokens that a request computes unless it is ended: an engine steps beside another one's step
TIMES = 24  # requests that end before what is remembered is counted, and between
BLOCKS = 480  # of an engine: P may keep those of every request until a lease ends
AT_ONCE_S = 0.25  # in which a request with bad params ends by itself, as most do
STATUS = {"abort": "FINISHED_ABORTED", "error": "FINISHED_ERROR"}  # vLLM's RequestStatus


def require_bounded_memory(
    rig: Rig, sides: tuple[Side, ...], repeat: Callable[[], object], ending: str
) -> None:
    """Raise Violation (KV-FINISH-003) if a connector remembers ever more requests that have ended: see
    `leaks.growing_memory`. `ending`: how they end, see `grows_with_own_workers`.

    If the connector has reports of its own, it is wrong only where its memory grows with them, too.
    """
    growing = growing_memory(sides, repeat, rig.subject.remembers)
    for (side, place), sentence in growing.items():
        for one in sides:
            one.require_standard_reports()
        own = side.classes_with("build_connector_worker_meta")
        if not own or grows_with_own_workers(rig, ending, side.role, place):
            diagnosis = "the connector keeps something of every request"
            raise rig.violation(LEFT, sentence, diagnosis=diagnosis)


def grows_with_own_workers(rig: Rig, ending: str, role: str, place: str) -> bool:
    """Whether a place in the scheduler half of P or D names ever more requests that have ended, where both
    halves of the connector run.

    `ending`: how requests end: whose ("plain", "p" or "d"), how, and in which state. `place`: as
    `leaks.remembered` names it. Where another case of the cell has seen this place grow, it is not looked at
    again. Raises Blocked if the worker half cannot run on this machine.
    """
    from pytest_kvconform.rigs.scheduler.live.config import LiveSpec
    from pytest_kvconform.rigs.scheduler.live.pair import live_engines

    known = rig.shared_file(f"{role}.grows")
    if known.exists() and place in known.read_text().splitlines():
        return True
    memory = rig.host.spec.memory
    tokens = max(memory["P"].block, memory["D"].block) + 5
    p, d = (
        LiveSpec(name, number, number, BLOCKS, longest=-(-tokens // memory[name].block) + 2)
        for number, name in enumerate("PD")
    )
    with live_engines(rig, p, d) as live:
        engine = live.p if role == "P" else live.d
        counts: list[int] = []
        for owner in range(2 * TIMES):
            with rig.wait(rig.settle_s):
                _end_one(live, ending, role, owner, rig.prompt(tokens, seed=owner))
            if owner % TIMES == TIMES - 1:
                counts.append(engine.do(_count, place))

        def step_and_count() -> int:
            for one in live.engines:
                one.step()
            return int(engine.do(_count, place))

        return _note_growth(rig, known, place, counts, step_and_count)


def grows_with_bad_params(rig: Rig, role: str, place: str, every: Iterator[dict[str, Any]]) -> bool:
    """Whether a place in the scheduler half of P or D names ever more ended requests that had these params,
    on an engine of this role with a worker half. A request that does not end by itself at once is aborted.

    `place` is as in `grows_with_own_workers`, and Blocked is raised as there.
    """
    from pytest_kvconform.rigs.scheduler.store_engine import (
        end_engine_with_worker,
        spare_port,
        start_engine_with_worker,
    )

    known = rig.shared_file(f"{role}.grows")
    if known.exists() and place in known.read_text().splitlines():
        return True
    side = start_engine_with_worker(rig, port=spare_port(rig, role), role=role)
    counts: list[int] = []
    try:
        for number in range(2 * TIMES):
            id = side.add(rig.prompt(3 * BLOCK), next(every))
            for _ in rig.waits(Deadline(rig.scaled_seconds(AT_ONCE_S))):
                if id in side.results:
                    break
                side.step()
            if side.status(id) != "gone" and id not in side.finished:
                side.abort(id)
            side.step()
            side.forget_records()
            if number % TIMES == TIMES - 1:
                counts.append(remembered(side, kept=False).get(place, 0))

        def step_and_count() -> int:
            side.step()
            return remembered(side, kept=False).get(place, 0)

        return _note_growth(rig, known, place, counts, step_and_count)
    finally:
        end_engine_with_worker(side)


def _note_growth(
    rig: Rig, known: Path, place: str, counts: list[int], step_and_count: Callable[[], int]
) -> bool:
    """Whether a place names more requests than before, even if engines step on for a while. It is noted for
    the other cases of the cell.
    """
    early, late = counts
    for _ in rig.waits(Deadline(rig.settle_s)):
        if late <= early:
            return False
        late = step_and_count()
    if late <= early:
        return False
    with known.open("a") as file:
        file.write(f"{place}\n")
    return True


def _end_one(live: Live, ending: str, role: str, owner: int, prompt: tuple[int, ...]) -> None:
    """Bring one request to its end. If P's memory is looked at and a request of D is to end, D loads what P
    handed over: P does not see how a request of D ends.
    """
    who, how, state = [*ending.split("-"), ""][:3]
    if who == "d" and role == "P":
        who, how, state = "p", "length", ""
    on_d = who == "d"
    tokens = 1 if how == "length" else 3 if how == "stop" else SEVERAL
    asked = live.rig.prefill_params() if who != "plain" else None
    if not on_d:
        id = live.p.add(prompt, owner, asked, max_tokens=tokens, stop=how == "stop")
        _bring_to_end(live, live.p, id, how, state)
        if who == "p" and not state:
            _load(live, prompt, owner, id, max_tokens=1)
        live.settle(lambda: not live.p.kept(), "releases")
    else:
        like = live.p.add(prompt, owner, asked)
        live.settle(lambda: live.p.ended([like]), "prefills")
        if how == "hit":
            warm = live.d.add(prompt[: live.d.side.block_size], owner)
            live.settle(lambda: live.d.ended([warm]), "requests of D")
        id = _load(live, prompt, owner, like, max_tokens=tokens, stop=how == "stop", ends=False)
        _bring_to_end(live, live.d, id, how, state)
        live.settle(lambda: not live.d.kept(), "releases")
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


def _bring_to_end(live: Live, engine: Any, id: str, how: str, state: str) -> None:
    """Let a request end in a state; "": by itself, or as the scheduler ends it after `how`."""
    if how == "failed":
        _let_load_fail(live.d, id)
    elif how == "preempted":
        live.settle(lambda: engine.statuses().get(id) in (None, "RUNNING"), "requests of D")
        engine.do(_preempt, id)
    if state == "running" and engine is live.d:
        live.settle(lambda: engine.statuses().get(id) in (None, "RUNNING"), "requests of D")
    if state:
        engine.do(_end_from_outside, id, how, state)
    else:
        live.settle(lambda: engine.ended([id]), "requests")


def _let_load_fail(d: LiveEngine, id: str) -> None:
    """Let the report of a load be that of one that failed."""
    work = d.side.worker
    assert work is not None

    def work_and_fail(output: Any) -> Any:
        reported = work(output)
        if reported is not None and id in (reported.finished_recving or ()):
            reported.failed_recving = {*(reported.failed_recving or ()), id}
            d.side.worker = work
        return reported

    d.side.worker = work_and_fail


# ---- what an engine does in its own process ----


def _count(engine: LiveEngine, place: str) -> int:
    """How many requests that have ended, and whose blocks are free, the scheduler half names in a place."""
    return remembered(engine.side, kept=False).get(place, 0)


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
        side.rig.step_until_matched(side, id)
    finally:
        side.worker = work
