"""What a scheduler half remembers of ended requests, where its own worker halves report.

The scripted workers of the scheduler rig cannot send what build_connector_worker_meta returns. A connector
may remember an ended request until its workers have reported there that they know of the end. So a case asks
(`Rig.ask`) whether the places that grew on its sides grow on engines of the cluster, whose workers report.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.cluster.loop import pause, watching
from pytest_kvconform.rigs.cluster.scripts.cluster import IDLE_S, RELEASES, Cluster, Engine, Steps, Wanted
from pytest_kvconform.rigs.engine.router import RENDEZVOUS
from pytest_kvconform.rigs.scheduler.connector_class import REPORTS, classes_with, require_standard_reports
from pytest_kvconform.rigs.scheduler.leaks import A_FEW, ENOUGH, LATER_S, growing_memory

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Rig
    from pytest_kvconform.rigs.scheduler.side import Side

LEFT = "KV-FINISH-003"  # the rule that nothing is left
SEVERAL = 16  # tokens that a request computes unless it is ended before; other engines let this one step, too
TIMES = 24  # requests that end before what is remembered is counted, and between
WINDOWS = 3  # in which a place may grow; so the memory of every third request is found
BLOCKS = 960  # of an engine: P may keep those of every request until a lease ends
LONGEST = 16  # blocks of a request
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


@dataclass(frozen=True)
class Question:
    """Which of these places in the scheduler half of P or D name ever more requests that have ended."""

    role: str
    places: frozenset[str]  # as `objects.named` names them
    ending: Ending | None = None  # how requests end; None: those of `params` do
    params: tuple[str, ...] = ()  # bad kv_transfer_params of requests, as JSON


def require_bounded_memory(
    rig: Rig, sides: tuple[Side, ...], repeat: Callable[[], object], ending: Ending
) -> None:
    """Raise Violation (KV-FINISH-003) if a connector remembers ever more requests that have ended: see
    `leaks.growing_memory`. `ending`: how they end.

    A connector with a build_connector_worker_meta of its own is wrong only where its memory also grows on
    engines whose workers call it.
    """
    growing = growing_memory(sides, repeat, rig.subject.remembers)
    for one in sides if growing else ():
        require_standard_reports(one)
    for side in sides:
        mine = {place: sentence for (where, place), sentence in growing.items() if where is side}
        if mine and classes_with(side, REPORTS):
            found = rig.ask(Question(side.role, frozenset(mine), ending))
            mine = {place: sentence for place, sentence in mine.items() if place in found}
        for sentence in mine.values():
            diagnosis = "the connector keeps something of every request"
            raise rig.violation(LEFT, sentence, diagnosis=diagnosis)


def grow_with_bad_params(
    rig: Rig, role: str, places: set[str], every: Iterable[dict[str, Any]]
) -> frozenset[str]:
    """Of these places, those that name ever more ended requests that had these params, on an engine of this
    role with a worker half. A request that does not end by itself at once is aborted.
    """
    params = tuple(json.dumps(one) for one in every)
    return rig.ask(Question(role, frozenset(places), params=params))


# ---- the script that answers -------------------------------------------------------------------------------


def growing_places(cluster: Cluster, question: Question) -> Steps:
    """Answer a question: the notes of the Evidence are the places that grow.

    A memory that has a limit is right, as in `leaks.growing_memory`. So what has grown is looked at again
    while it names no more than it may, and a day later.
    """
    ending, may, owners = question.ending, max(ENOUGH, cluster.subject.remembers), itertools.count()
    policy = "recompute" if ending and ending.how == "failed" else "fail"
    yield from cluster.start(*(Wanted(role, BLOCKS, longest=LONGEST, policy=policy) for role in "PD"))
    engine = cluster.p if question.role == "P" else cluster.d
    end_one = partial(_end_one, ending, question.role) if ending else partial(_end_one_with, question.params)

    def end_some(times: int) -> Steps:
        for owner in itertools.islice(owners, times):
            yield from end_one(cluster, engine, owner)

    yield from end_some(TIMES)
    for _ in range(WINDOWS):
        early = yield from engine.call("remembered")
        yield from end_some(TIMES)
        found = yield from _above(cluster, engine, question.places, early)
        if not any(number <= may for number in found.values()):
            break
        yield from end_some(may)
    if found:
        counted = yield from engine.call("remembered")
        early = {place: max(may, number - 1) for place, number in counted.items()}
        for one in cluster.engines:
            yield from one.call("set_clock_ahead", LATER_S, True)
        yield from end_some(A_FEW)
        found = yield from _above(cluster, engine, frozenset(found), early)
    return Evidence(looked_at=next(owners), unit="requests", notes=dict.fromkeys(found, 1))


def _above(cluster: Cluster, engine: Engine, places: frozenset[str], early: dict[str, int]) -> Steps:
    """Of these places, those that name more requests than before, even if engines step on for a while, and
    how many.
    """
    late, deadline = (yield from engine.call("remembered")), watching(cluster.settle_s, *cluster.engines)
    while any(late.get(place, 0) > early.get(place, 0) for place in places) and not deadline.over():
        for one in cluster.engines:
            yield from cluster.step(one)
        yield from pause(IDLE_S)
        late = yield from engine.call("remembered")
    return {place: late[place] for place in places if late.get(place, 0) > early.get(place, 0)}


def _end_one_with(every: tuple[str, ...], cluster: Cluster, engine: Engine, owner: int) -> Steps:
    """Let a request with bad params end. A day passes: leases end of what no D reads."""
    params = json.loads(every[owner % len(every)])
    prompt = cluster.prompt(3 * cluster.block(engine), owner)
    id = yield from cluster.add(engine, prompt, owner, params=params)
    deadline = watching(cluster.context.scaled_seconds(AT_ONCE_S), engine)
    while not cluster.ended(engine, [id]) and not deadline.over():
        yield from cluster.step(engine)
    yield from cluster.abort(engine, id)
    yield from cluster.step(engine)
    yield from engine.call("set_clock_ahead", (owner + 2) * LATER_S, True)
    deadline = watching(cluster.context.scaled_seconds(AT_ONCE_S), engine)
    while cluster.looks[engine].kept and not deadline.over():
        yield from cluster.step(engine)
    yield from engine.call("evict_prefix_cache")


def _end_one(ending: Ending, role: str, cluster: Cluster, _: Engine, owner: int) -> Steps:
    """Bring one request to its end. If P's memory is looked at and a request of D is to end, D loads what P
    handed over: P does not see how a request of D ends.
    """
    if ending.whose == "d" and role == "P":
        ending = Ending("p", "length")
    p, d, how = cluster.p, cluster.d, ending.how
    prompt = cluster.prompt(3 * max(cluster.block(p), cluster.block(d)) + 5, owner)
    given: dict[str, Any] = {
        "max_tokens": 1 if how == "length" else 3 if how == "stop" else SEVERAL,
        "stop": how == "stop",
    }
    asks = ending.whose != "plain" and not cluster.store
    if ending.whose != "d":
        id = yield from cluster.add(p, prompt, owner, asks=asks, **given)
        yield from _bring_to_end(cluster, p, id, ending)
        returned = id in p.ends and p.ends[id].output.kv_transfer_params
        if ending.whose == "p" and not ending.state and (returned or cluster.subject.handover == RENDEZVOUS):
            loads = yield from cluster.add(d, prompt, owner, like=id, source=p)
            yield from cluster.settle(lambda: cluster.ended(d, [loads]), "requests of D")
        yield from cluster.settle(lambda: not cluster.looks[p].kept, RELEASES)
    else:
        [like] = (yield from cluster.prefill({owner: prompt})).values()
        if how == "hit":
            warm = yield from cluster.add(d, prompt[: cluster.block(d)], owner)
            yield from cluster.settle(lambda: cluster.ended(d, [warm]), "requests of D")
        id = yield from cluster.add(d, prompt, owner, like=like, source=p, **given)
        yield from _bring_to_end(cluster, d, id, ending)
        yield from cluster.settle(lambda: not cluster.looks[d].kept, RELEASES)
    for one in cluster.engines:
        yield from cluster.step(one)
        yield from one.call("evict_prefix_cache")


def _bring_to_end(cluster: Cluster, engine: Engine, id: str, ending: Ending) -> Steps:
    """Let a request come to this end."""
    how, state = ending.how, ending.state

    def runs() -> bool:
        return cluster.looks[engine].statuses.get(id) in (None, "RUNNING")

    if how == "failed":
        yield from engine.call("fail_load", id)
    elif how == "preempted":
        yield from cluster.settle(runs, "requests of D")
        yield from engine.call("preempt", id)
    if not state:
        yield from cluster.settle(lambda: cluster.ended(engine, [id]), "requests")
        return
    if state == "loading":
        # Between the workers' step in which its load begins and update_from_output. For the scheduler half
        # the load is under way, though it may end in that step.
        yield from engine.call("abort_once_admitted", (id,), STATUS[how])
        waits = "requests of D"
        yield from cluster.settle(lambda: cluster.looks[engine].statuses.get(id) != "WAITING", waits)
        yield from engine.call("abort_once_admitted", ())
        return
    if state == "waiting":
        yield from engine.call("take_free_blocks")
        yield from cluster.step(engine)
    elif state == "running":
        yield from engine.call("budget", cluster.block(engine))
        yield from cluster.settle(runs, "requests of D")
    yield from engine.call("end_request", id, STATUS[how])
    yield from engine.call("return_blocks")
