"""A P whose process stands still while D loads, on the real transport, and goes on when D has given up, or
has shut down, or is killed.

A transport that cannot cancel a read writes when P goes on. Over TCP NIXL is such a transport:
`release_xfer_handle` of a read in progress succeeds, and UCX goes on writing.
"""

from __future__ import annotations

import time
from functools import partial

from pytest_kvconform.rigs.bytes.specs import ports_of
from pytest_kvconform.rigs.cluster.engine import Engine, Steps
from pytest_kvconform.rigs.cluster.loop import let_run, pause, until
from pytest_kvconform.rigs.cluster.peers.scenario_engines import (
    WITHIN_STEP,
    ScenarioEngines,
    ScenarioObservation,
    loaded_within_step,
)
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.messages import LOADING
from pytest_kvconform.rigs.processes.ports import keep_again

LIMIT, ABORT = "time_limit", "abort"  # why D no longer needs the load
SLEEP_S = 2.5  # in which D may give up while P's process is stopped: longer than a load may take
LOADING_S = 0.5  # before D aborts the request, or shuts down
IN_STEP = "D stands in a step until P goes on, so that it cannot shut down during a load"
LATE_S = 0.5  # in which D writes what is still to come
BEGIN_S = 0.3  # in which a load that D has begun reaches P's machine
BACK_OFF_S = 10.0  # for which D may compute what it could load, after a failure
BETWEEN_S = 0.5  # two prompts of such a D


def sleeping_peer(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """P's process is stopped during a load of D. D aborts the request, or the load passes its time limit.

    Other requests of D get blocks as soon as they are free, and write them. Then P goes on, and D's pool is
    compared. `numbers`: why -> whether the request had ended, and its blocks were free, before P went on.
    `loads`: in how many of both the load was under way while P's process was stopped.
    """
    bench = engines.bench
    decodes = {"met": (yield from engines.decode(d, (yield from engines.prefill(p))))}
    if loaded_within_step(decodes["met"].trace):
        return ScenarioObservation(decodes, unsupported=WITHIN_STEP)
    yield from engines.wait_until_empty(d)
    yield from d.call("reuse", True)
    numbers, audits = {"loads": 0.0}, ()
    for why in (LIMIT, ABORT):
        prefill = yield from engines.prefill(p)
        yield from p.stop_process()
        added = time.monotonic()
        request = yield from engines.add_decode(d, prefill)
        begun = yield from _begins_load(d, request.id, bench.scaled_seconds(SLEEP_S))
        numbers["loads"] += begun is not None and begun.status == LOADING
        if why == ABORT:
            yield from _load(engines, d)
            d.queue("abort", request.id)  # D may stand in a step until P goes on
        if given_up := (yield from _is_gone(d, request.id, bench.scaled_seconds(SLEEP_S))):
            yield from _overwrite(engines, d)
        numbers[why] = float(given_up)
        p.resume()
        yield from engines.wait_until_gone(d, request.id, engines.limits.release)
        yield from let_run(bench.scaled_seconds(LATE_S), p, d)
        yield from _overwrite(engines, d)
        audits += yield from d.call("audit")
        if why == LIMIT:
            decodes[why] = yield from engines.finish_decode(d, request, added)
    yield from d.call("reuse", False)
    decodes["after"] = yield from engines.decode(d, (yield from engines.prefill(p)))
    return ScenarioObservation(decodes, audits=audits, numbers=numbers)


def shutdown_during_load(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """P's process is stopped during a load of D, and D shuts down. Then P goes on. It may end: over TCP NIXL
    aborts a process that still sends to an agent which is gone (docs/findings.md).

    `numbers`: whether the load was under way, and if not, whether D's request had ended. If it was: whether
    the shutdown has returned, how many bytes of D's pool have changed since, before P went on and in all, and
    whether P has ended.
    """
    decodes = {"met": (yield from engines.decode(d, (yield from engines.prefill(p))))}
    if loaded_within_step(decodes["met"].trace):
        return ScenarioObservation(decodes, unsupported=WITHIN_STEP)
    prefill, bench = (yield from engines.prefill(p)), engines.bench
    yield from p.stop_process()
    request = yield from engines.add_decode(d, prefill)
    yield from _begins_load(d, request.id, bench.scaled_seconds(SLEEP_S))
    yield from _load(engines, d)
    d.paused = True
    if not (yield from until(lambda: not (d.pending or d.queued), d.deadline(bench.scaled_seconds(SLEEP_S)))):
        p.resume()
        d.resume()
        return ScenarioObservation(decodes, unsupported=IN_STEP)
    ended, trace = request.id in d.ends, (yield from d.call("trace", request.id))
    loading = bool(trace.external_tokens) and trace.status == LOADING and not ended
    numbers = {"loading": float(loading), "ended": float(ended)}
    if not loading:
        p.resume()
        d.resume()
        return ScenarioObservation(decodes, numbers=numbers)
    # The whole deadline, although other waits may have ended in vain: the case names it. No call ends before.
    limit = Deadlines.scaled(bench.context.settings.timeout_scale).request
    d.handle.deadline_s = max(d.handle.deadline_s, 2 * limit)
    ending = d.queue("shutdown_during_loads")
    numbers |= {"returned": (yield from until(lambda: ending.done, d.deadline(limit))), "written": 0.0}
    late = bench.scaled_seconds(LATE_S)
    if numbers["returned"]:
        numbers["early"] = float((yield from d.call("written_since_shutdown", late)))
    p.may_die = True
    p.resume()
    if numbers["returned"]:
        yield from let_run(late, p)  # D writes no more than P sends
        numbers["written"] = float((yield from d.call("written_since_shutdown", late)))
    numbers["p_ended"] = float(p.failed is not None)
    d.end()
    return ScenarioObservation(decodes, numbers=numbers, raised=ending.answer or "")


def restarted_peer(engines: ScenarioEngines, p: Engine, d: Engine, stranger: Engine) -> Steps:
    """P is stopped during a load and killed, and another engine is started on its ports.

    D has met the old one, and the stranger has met neither.
    """
    met = yield from engines.decode(d, (yield from engines.prefill(p)))
    old, older = (yield from engines.prefill(p)), (yield from engines.prefill(p))
    last = yield from engines.prefill(p)
    yield from p.stop_process()
    began, interrupted = time.monotonic(), (yield from engines.add_decode(d, last))
    seconds = engines.bench.scaled_seconds(BEGIN_S)
    limit = seconds if loaded_within_step(met.trace) else engines.bench.scaled_seconds(SLEEP_S)
    yield from _begins_load(d, interrupted.id, limit)
    yield from let_run(seconds, d, most=3 * seconds)
    for port in ports_of(p.handle.spec):
        keep_again(port)
    p.end()
    new = engines.start("P2b", after="P2")
    yield from new.call("usage")
    added = time.monotonic()
    one = yield from engines.add_decode(d, old)
    other = yield from engines.add_decode(stranger, older)
    decodes = {
        "met": met,
        "interrupted": (yield from engines.finish_decode(d, interrupted, began)),
        "old": (yield from engines.finish_decode(d, one, added)),
        "stranger": (yield from engines.finish_decode(stranger, other, added)),
    }
    decodes["new"] = yield from first_load(engines, new, d)
    decodes["new_stranger"] = yield from first_load(engines, new, stranger)
    return ScenarioObservation(decodes)


def first_load(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """Let P hand prompts over until D does not compute one itself, for BACK_OFF_S at most.

    After a failure a connector may leave a peer, or an address, alone for a while. Returns DecodeResult of
    the last prompt.
    """
    deadline = d.deadline(engines.bench.scaled_seconds(BACK_OFF_S))
    while True:
        decode = yield from engines.decode(d, (yield from engines.prefill(p)))
        if decode.finish != "length" or decode.trace.external_tokens or deadline.over():
            return decode
        yield from pause(BETWEEN_S)


def _load(engines: ScenarioEngines, d: Engine) -> Steps:
    """Let D load until its threads or NIXL have begun to read.

    A connector's patience with P, and the limit of a load (LOAD_S), end by the clock. This ends before.
    """
    seconds = engines.bench.scaled_seconds(LOADING_S)
    yield from let_run(seconds, d, most=1.5 * seconds)


def _begins_load(d: Engine, request_id: str, seconds: float) -> Steps:
    """Wait until D has begun to load a request, or the request has ended, or D stands in a step.

    Returns D's `Trace` of a load that has begun, else None.
    """
    deadline = d.deadline(seconds)
    while request_id not in d.ends and not deadline.over():
        trace = d.queue("trace", request_id)
        if not (yield from until(partial(getattr, trace, "done"), deadline)):
            return None
        if trace.answer.external_tokens:
            return trace.answer
        yield
    return None


def _is_gone(engine: Engine, request_id: str, seconds: float) -> Steps:
    """Whether an engine that answers holds nothing of a request any more, within `seconds`."""
    deadline = engine.deadline(seconds)
    while not deadline.over():
        usage = engine.queue("usage")
        if not (yield from until(partial(getattr, usage, "done"), deadline)):
            return False
        if request_id not in usage.answer.requests:
            return True
        yield
    return False


def _overwrite(engines: ScenarioEngines, d: Engine) -> Steps:
    """Wait until other requests have written every block that D has freed, and have ended."""
    deadline = d.deadline(engines.limits.release)
    while not (yield from d.call("overwritten")) and not deadline.over():
        yield
