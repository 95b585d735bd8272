"""Scenarios about what each rank of an engine reports, and when.

They run one after the other on one P and one D.
"""

from __future__ import annotations

import time

from msgspec.structs import replace

from pytest_kvconform.rigs.peers.scenario_engines import HELD, ScenarioEngines, ScenarioObservation
from pytest_kvconform.rigs.peers.stepping import SteppedEngine, Steps, pause, until
from pytest_kvconform.rigs.scenario import STATUS, Faults

RANKS = ("P9", "D9")  # the engines
AWHILE_S = 0.2  # engines step often enough in this time for whatever else is to happen


def last_rank(d: SteppedEngine, faults: Faults) -> Faults:
    """The same faults for the last rank of D alone."""
    return replace(faults, ranks=(d.handle.ranks - 1,))


def hand_overs(engines: ScenarioEngines, p: SteppedEngine, d: SteppedEngine) -> Steps:
    """P hands requests over to D; for one of them the last rank of D is slow.

    P also computes one request that no D loads, and aborts one.
    """
    first = yield from engines.prefill(p)
    decodes = {"first": (yield from engines.decode(d, first))}
    second = yield from engines.prefill(p)
    held = yield from engines.add_decode_with_faults(d, second, last_rank(d, HELD))
    if not isinstance(held, str):
        yield from pause(engines.bench.scaled_seconds(AWHILE_S))
        yield from d.call("start_held_transfers")
        decodes["slow"] = yield from engines.finish_decode(d, *held)
    own = yield from engines.decode(p, None)
    aborted = engines.make_request(engines.new_prompt(), "p", engines.prefill_params())
    yield from p.call("add_and_abort", aborted)
    last = yield from engines.prefill(p)
    decodes["last"] = yield from engines.decode(d, last)
    prefills = {"first": first, "last": last} | ({"slow": second} if "slow" in decodes else {})
    yield from engines.wait_until_empty(p)
    return ScenarioObservation(decodes, prefills, request_ids={"own": own.id, "aborted": aborted.id})


def load_on_idle_engine(engines: ScenarioEngines, p: SteppedEngine, d: SteppedEngine) -> Steps:
    """D loads one request and has nothing to compute meanwhile.

    If the load does not end, D gets something to compute.
    """
    prefill = yield from engines.prefill(p)
    added, request = time.monotonic(), (yield from engines.add_decode(d, prefill))
    by_itself = yield from until(lambda: request.id in d.outputs, d.deadline(engines.limits.release))
    if not by_itself:
        yield from engines.decode(d, None)
    decode = yield from engines.finish_decode(d, request, added)
    return ScenarioObservation({"quiet": decode}, {"quiet": prefill}, numbers={"by_itself": by_itself})


def aborted_before_load(engines: ScenarioEngines, p: SteppedEngine, d: SteppedEngine) -> Steps:
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


def aborted_during_load(engines: ScenarioEngines, p: SteppedEngine, d: SteppedEngine) -> Steps:
    """A request is aborted on D while its transfers are under way; they end later."""
    prefill = yield from engines.prefill(p)
    held = yield from engines.add_decode_with_faults(d, prefill, HELD)
    if isinstance(held, str):
        return ScenarioObservation(unsupported=held)
    request, _ = held
    yield from d.call("abort", request.id)
    yield from pause(engines.bench.scaled_seconds(AWHILE_S))
    before, while_held = (yield from d.call("usage")), (yield from d.call("rank_observations"))
    yield from d.call("start_held_transfers")
    after = yield from engines.wait_until_empty(d)
    audits = yield from d.call("audit")
    decodes = {"last": (yield from engines.decode(d, (yield from engines.prefill(p))))}
    return ScenarioObservation(
        decodes,
        {"aborted": prefill},
        audits,
        {"before": before, "after": after},
        request_ids={"aborted": request.id},
        ranks_while_held=while_held,
    )


def failed_load(engines: ScenarioEngines, p: SteppedEngine, d: SteppedEngine) -> Steps:
    """The last rank of D cannot read one request."""
    prefill = yield from engines.prefill(p)
    faults = last_rank(d, Faults(transfers=(0,), fail=STATUS))
    held = yield from engines.add_decode_with_faults(d, prefill, faults)
    if isinstance(held, str):
        return ScenarioObservation(unsupported=held)
    decodes = {"failed": (yield from engines.finish_decode(d, *held))}
    decodes["last"] = yield from engines.decode(d, (yield from engines.prefill(p)))
    return ScenarioObservation(decodes, {"failed": prefill})
