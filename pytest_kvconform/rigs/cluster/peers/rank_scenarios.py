"""Scenarios about what each rank of an engine reports, and when; and about two peers of one engine.

Those about ranks run one after the other on one P and one D.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from pytest_kvconform.rigs.bytes.faulty.messages import FAILED, KNOWN, MOMENTS, REPORTED
from pytest_kvconform.rigs.cluster.engine import Engine, Steps
from pytest_kvconform.rigs.cluster.loop import let_run, until
from pytest_kvconform.rigs.cluster.peers.scenario_engines import (
    BLOCK,
    HELD,
    KEPT,
    NO_TRANSFER,
    PeerScenario,
    PrefillResult,
    ScenarioEngines,
    ScenarioObservation,
)
from pytest_kvconform.rigs.engine.messages import Usage
from pytest_kvconform.rigs.history import History
from pytest_kvconform.rigs.scenario import STATUS, Faults

RANKS = ("P9", "D9")  # the engines
# Why D loads nothing: its request is aborted before it is scheduled, or while it waits for a block; D's
# prefix cache has the whole prompt; the request must not read the prefix cache.
UNREAD = ("waiting", "asked", "whole", "dropped")
LOOKED_S = 0.5  # of a lease: with less left nobody can say that P still holds blocks
TURNS = ("first", "second")  # of two P's from which a D loads, or of two D's
STEPS = 4  # in which D begins loads and hears of their ends
AWHILE_S = 0.2  # engines step often enough in this time for whatever else is to happen


def unread(matrix: str) -> tuple[str, ...]:
    """The reasons of UNREAD that a run tries."""
    return ("waiting", "dropped") if matrix == "quick" else UNREAD


def moments(matrix: str) -> tuple[str, ...]:
    """The moments of MOMENTS that a run tries."""
    return (REPORTED, KNOWN) if matrix == "quick" else MOMENTS


def last_rank(d: Engine, faults: Faults) -> Faults:
    """The same faults for the last rank of D alone."""
    return replace(faults, ranks=(d.ranks - 1,))


def of_ranks(d: Engine, before: tuple[History, ...] = ()) -> Steps:
    """What each rank of an engine has done, since an earlier look: it is in other scenarios, too."""
    _, *now = yield from d.call("histories")
    return tuple(one.since(then) for one, then in zip(now, before, strict=True)) if before else tuple(now)


def hand_overs(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """P hands requests over to D; for one of them the last rank of D is slow.

    P also computes one request that no D loads, and aborts one.
    """
    first = yield from engines.prefill(p)
    decodes = {"first": (yield from engines.decode(d, first))}
    second = yield from engines.prefill(p)
    held = yield from engines.add_decode_with_faults(p, d, second, last_rank(d, HELD))
    if not isinstance(held, str):
        yield from let_run(engines.bench.scaled_seconds(AWHILE_S), p, d)
        yield from engines.start_held_transfers(p, d, held[0])
        decodes["slow"] = yield from engines.finish_decode(d, *held)
    own = yield from engines.decode(p, None)
    aborted = engines.make_request(engines.new_prompt(), "p", engines.prefill_params())
    yield from p.call("add_and_abort", aborted)
    last = yield from engines.prefill(p)
    decodes["last"] = yield from engines.decode(d, last)
    prefills = {"first": first, "last": last} | ({"slow": second} if "slow" in decodes else {})
    yield from engines.wait_until_empty(p)
    return ScenarioObservation(decodes, prefills, request_ids={"own": own.id, "aborted": aborted.id})


def load_on_idle_engine(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """D loads one request and has nothing to compute meanwhile.

    If the load does not end, D gets something to compute.
    """
    prefill, before = (yield from engines.prefill(p)), (yield from of_ranks(d))
    added, request = time.monotonic(), (yield from engines.add_decode(d, prefill))
    by_itself = yield from until(lambda: request.id in d.ends, d.deadline(engines.limits.release))
    if not by_itself:
        yield from engines.decode(d, None)
    decode = yield from engines.finish_decode(d, request, added)
    ranks = yield from of_ranks(d, before)
    return ScenarioObservation(
        {"quiet": decode}, {"quiet": prefill}, numbers={"by_itself": by_itself}, ranks=ranks
    )


def aborted_before_load(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """A request is aborted on D before it is scheduled.

    D has nothing to load, and P need not keep the blocks.
    """
    prefill = yield from engines.prefill(p)
    request = engines.make_request(prefill.number, "d", prefill.params)
    yield from d.call("add_and_abort", request)
    yield from engines.wait_until_freed(p, prefill, engines.limits.release)
    last = yield from engines.prefill(p)
    decodes = {"last": (yield from engines.decode(d, last))}
    return ScenarioObservation(
        decodes, {"given_up": prefill, "last": last}, request_ids={"given_up": request.id}
    )


def seconds_until_freed(engines: ScenarioEngines, p: Engine, prefill: PrefillResult) -> Steps:
    """Wait until P has freed the blocks of a prompt, while its lease lasts.

    Returns the seconds since the prompt came; negative: so many seconds later P still held them; the lease:
    too little of it was left to look.
    """
    looked = min(LOOKED_S, engines.lease_s * KEPT / 4)
    held = prefill.added + engines.lease_s * KEPT - time.monotonic()
    freed = yield from engines.wait_until_freed(p, prefill, min(held, engines.limits.release))
    so_far = (freed or time.monotonic()) - prefill.added
    return so_far if freed else -so_far if held > looked else engines.lease_s


def nothing_to_load(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """P computes prompts of which D loads nothing, each for another reason (`UNREAD`).

    `numbers`: reason -> `seconds_until_freed`.
    """
    met = yield from engines.decode(d, (yield from engines.prefill(p)))
    decodes, numbers, length = {}, {}, engines.length // BLOCK * BLOCK + 1
    p.longest_gap = d.longest_gap = 0.0
    for why in unread(engines.bench.context.settings.matrix):
        prefill = yield from engines.prefill(p, length)
        request = engines.make_request(prefill.number, "d", prefill.params, length)
        if why == "waiting":
            yield from d.call("pause", True)
            yield from d.call("add_and_abort", request)
        elif why == "asked":
            yield from d.call("ask_and_keep_in_queue", request.id)
            yield from d.call("add", request)
            yield from let_run(engines.bench.scaled_seconds(AWHILE_S), d)
            yield from d.call("abort", request.id)
        else:
            if why == "whole":
                own = engines.make_request(prefill.number, "d", None, length)
                yield from d.call("add", own)
                yield from engines.finish_decode(d, own, time.monotonic())
            yield from d.call("add" if why == "whole" else "add_without_prefix_cache", request)
            decodes[why] = yield from engines.finish_decode(d, request, time.monotonic())
        numbers[why] = yield from seconds_until_freed(engines, p, prefill)
        if why == "waiting":
            yield from d.call("pause", False)
    return ScenarioObservation({"met": met, **decodes}, numbers=numbers, too_slow=engines.too_slow(p, d))


def aborted_during_load(engines: ScenarioEngines, p: Engine, d: Engine, faults: Faults = HELD) -> Steps:
    """A request is aborted on D while transfers of it are under way (`faults`); they end later.

    `numbers`: "not_begun": whether the connector knows that held transfers have not begun. Its fault hook
    holds them. NIXL's agents hold what the connector has begun.
    """
    prefill = yield from engines.prefill(p)
    held = yield from engines.add_decode_with_faults(p, d, prefill, faults)
    if isinstance(held, str):
        return ScenarioObservation(unsupported=held)
    request, awhile = held[0], engines.bench.scaled_seconds(AWHILE_S)
    if faults.ranks:
        yield from let_run(awhile, p, d, most=3 * awhile)  # the others report
    yield from d.call("abort", request.id)
    yield from let_run(awhile, p, d, most=3 * awhile)
    before, ranks = (yield from d.call("usage")), (yield from of_ranks(d))
    reports = yield from d.call("fault_reports")
    not_begun = any(report.hooks and not report.agents for report in reports)
    yield from engines.start_held_transfers(p, d, request)
    if not_begun:  # what the connector still begins shall show in the audit
        yield from let_run(awhile, p, d, most=3 * awhile)
    after = yield from engines.wait_until_empty(d)
    audits = yield from d.call("audit")
    decodes = {"last": (yield from engines.decode(d, (yield from engines.prefill(p))))}
    return ScenarioObservation(
        decodes,
        {"aborted": prefill},
        audits,
        {"before": before, "after": after},
        numbers={"not_begun": not_begun},
        request_ids={"aborted": request.id},
        ranks=ranks,
    )


def aborted_after_one_rank(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """A request is aborted on D when all ranks but the last have loaded it."""
    return (yield from aborted_during_load(engines, p, d, last_rank(d, HELD)))


def aborted_at_end_of_load(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """One request after the other is aborted on D at another moment of the step in which its load ends.

    `numbers`: moment -> blocks that D holds then and cannot give back; -1: the request was not aborted.
    """
    return (yield from _abort_at(engines, p, d, moments(engines.bench.context.settings.matrix)))


def worker_fails_at_end_of_load(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """The step of D fails in which a rank reports a load. All requests are aborted, and D goes on.

    `numbers`: as in `aborted_at_end_of_load`, of the moment FAILED.
    """
    return (yield from _abort_at(engines, p, d, (FAILED,)))


def _abort_at(engines: ScenarioEngines, p: Engine, d: Engine, when: tuple[str, ...]) -> Steps:
    numbers = {}
    for moment in when:
        prefill = yield from engines.prefill(p)
        request = engines.make_request(prefill.number, "d", prefill.params)
        before: Usage = yield from d.call("usage")
        yield from d.call("abort_at_end_of_load", request.id, moment)
        yield from d.call("add", request)
        gone = yield from engines.wait_until_gone(d, request.id, engines.limits.release)
        usage: Usage = yield from d.call("usage")
        held = 0 if gone else before.free_blocks - usage.free_blocks
        aborted = request.id in (yield from d.call("aborted"))
        numbers[moment] = float(held if aborted else -1)
        if held:
            break
    decodes = {"last": (yield from engines.decode(d, (yield from engines.prefill(p))))}
    return ScenarioObservation(decodes, numbers=numbers)


def failed_load(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """The last rank of D cannot read one request, maybe before D announces a load."""
    prefill, before = (yield from engines.prefill(p)), (yield from of_ranks(d))
    faults = last_rank(d, Faults(transfers=(0,), fail=STATUS))
    held = yield from engines.add_decode_with_faults(p, d, prefill, faults)
    if held == NO_TRANSFER:
        prefill = yield from engines.prefill(p)
        held = yield from engines.add_decode_with_faults(p, d, prefill, faults, at_once=True)
    if isinstance(held, str):
        return ScenarioObservation(unsupported=held)
    decodes = {"failed": (yield from engines.finish_decode(d, *held))}
    decodes["last"] = yield from engines.decode(d, (yield from engines.prefill(p)))
    return ScenarioObservation(decodes, {"failed": prefill}, ranks=(yield from of_ranks(d, before)))


def two_peers(engines: ScenarioEngines, p: Engine, other: Engine, d: Engine) -> Steps:
    """D loads from two P's in turn, from each of them twice, and then from both in the same steps. Then it
    begins a load from the first P in the step after the one in which it has heard of the end of another.

    The pool of the second P is larger: its KV lies at other addresses. `numbers`: request of those of the
    same steps, or the one before the other -> `seconds_until_freed`.
    """
    decodes, numbers, both = {}, {}, {}
    for turn in TURNS:
        for name, peer in (("one", p), ("other", other)):
            decodes[f"{turn}_{name}"] = yield from engines.decode(d, (yield from engines.prefill(peer)))
    p.longest_gap = other.longest_gap = d.longest_gap = 0.0
    for name, peer in (("both_one", p), ("both_other", other)):
        both[name] = peer, (yield from engines.prefill(peer))
    yield from d.pause_stepping()
    added, requests = time.monotonic(), {}
    for name, (_, prefill) in both.items():
        requests[name] = yield from engines.add_decode(d, prefill)
    awhile = engines.bench.scaled_seconds(AWHILE_S) / 2
    for _ in range(STEPS):  # what one load does by itself, the other does before the next step
        yield from d.call("step", 0.0)
        if all(request.id in d.ends for request in requests.values()):
            break
        yield from let_run(awhile, d, most=2 * awhile)
    d.resume()
    for name, request in requests.items():
        decodes[name] = yield from engines.finish_decode(d, request, added)
    for name, (peer, prefill) in both.items():
        numbers[name] = yield from seconds_until_freed(engines, peer, prefill)
    before, then = (yield from engines.prefill(p)), (yield from engines.prefill(p))
    yield from d.pause_stepping()
    added, ends = time.monotonic(), (yield from engines.add_decode(d, before))
    for _ in range(STEPS):
        yield from d.call("step", 0.0)
        if (yield from d.call("has_read_load", ends.id)):
            break
        yield from let_run(awhile, d, most=2 * awhile)
    begins = yield from engines.add_decode(d, then)
    yield from d.call("step", 0.0)
    d.resume()
    decodes["before"] = yield from engines.finish_decode(d, ends, added)
    decodes["then"] = yield from engines.finish_decode(d, begins, added)
    numbers["before"] = yield from seconds_until_freed(engines, p, before)
    too_slow = engines.too_slow(p, d) or engines.too_slow(other, d)
    return ScenarioObservation(decodes, numbers=numbers, too_slow=too_slow)


def two_readers(engines: ScenarioEngines, p: Engine, d: Engine, other: Engine) -> Steps:
    """Two D's load from one P in turn, each of them twice. `numbers`: request -> `seconds_until_freed`."""
    decodes, numbers = {}, {}
    p.longest_gap = d.longest_gap = other.longest_gap = 0.0
    for turn in TURNS:
        for name, reader in (("one", d), ("other", other)):
            prefill = yield from engines.prefill(p)
            decodes[f"{turn}_{name}"] = yield from engines.decode(reader, prefill)
            numbers[f"{turn}_{name}"] = yield from seconds_until_freed(engines, p, prefill)
    return ScenarioObservation(decodes, numbers=numbers, too_slow=engines.too_slow(p, d))


def two_samples(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """Two requests of D have the params of one hand-over, as two samples of one prompt do (ParentRequest in
    vLLM's v1/engine/parallel_sampling.py). The second one comes when the first one has been loaded.

    P has freed and overwritten its blocks by then, and D's prefix cache has lost what was loaded.
    `numbers`: "freed": `seconds_until_freed`, after the load of the first; "forgotten": whether D's prefix
    cache has lost it.
    """
    prefill = yield from engines.prefill(p)
    decodes = {"first": (yield from engines.decode(d, prefill))}
    numbers = {"freed": (yield from seconds_until_freed(engines, p, prefill))}
    yield from engines.wait_until_empty(d)
    numbers["forgotten"] = float((yield from d.call("reset_prefix_cache")))
    decodes["second"] = yield from engines.decode(d, prefill)
    decodes["after"] = yield from engines.decode(d, (yield from engines.prefill(p)))
    return ScenarioObservation(decodes, numbers=numbers)


def _in_turn(*scenarios: Callable[..., Steps]) -> dict[str, PeerScenario]:
    """Scenarios about ranks, by name. They have engines of their own and run one after the other: a fault
    holds for all requests of an engine.
    """
    found: dict[str, PeerScenario] = {}
    for steps in scenarios:
        found[steps.__name__] = PeerScenario(steps, RANKS, after=next(reversed(found), ""))
    return found


_WHOLE = (hand_overs, load_on_idle_engine, aborted_before_load, nothing_to_load, aborted_during_load)
SCENARIOS: dict[str, dict[str, PeerScenario]] = {
    "P1D1": _in_turn(*_WHOLE, aborted_at_end_of_load, failed_load),
    "P2D1": _in_turn(*_WHOLE, aborted_at_end_of_load, failed_load),
    "P1D2": _in_turn(
        *_WHOLE, aborted_after_one_rank, aborted_at_end_of_load, failed_load, worker_fails_at_end_of_load
    ),
}
