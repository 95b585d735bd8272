"""The bench of cases on peers: each scenario that cases of a cell observe runs once, beside the others."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec

from pytest_kvconform.result import Blocked, Cell, HarnessError, HookCall
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec
from pytest_kvconform.rigs.bytes.specs import byte_engine_spec, over_tcp
from pytest_kvconform.rigs.cluster.byte_bench import blocked_by_start
from pytest_kvconform.rigs.cluster.loop import Script, run
from pytest_kvconform.rigs.cluster.peers.rank_scenarios import UNREAD
from pytest_kvconform.rigs.cluster.peers.scenario_engines import (
    AT_ONCE,
    DecodeResult,
    PeerScenario,
    ScenarioEngines,
    ScenarioObservation,
    prompt_length,
    together,
)
from pytest_kvconform.rigs.cluster.peers.scenarios import BAD, CUT, LIMITED, ON_THEIR_OWN, OVER_TCP, SCENARIOS
from pytest_kvconform.rigs.cluster.peers.sleeping_peer import LIMIT
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.engine.handle import hook_calls
from pytest_kvconform.rigs.processes.cores import own_core_wait

# heartbeats prolong it by a third less, and a busy machine may keep an engine from stepping for a second
LEASE_S = 3
LOAD_S = 1.0  # that a load may take, where the connector declares `load_timeout`
# as users set it, here for one side
ROPE = {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 4e4}}}
MORE_BLOCKS = 13  # of a P whose pool is larger than that of the others
LONGER = 2  # leases are so many times as long after a run on a machine that was too slow
BUSY = 0.2  # part of the time for which this process waits for a core, on a machine that is busy
# Requests that may find P's lease at its end or its blocks freed, or wait long for a P that does not answer.
LATE = {"late", "waiting", "chosen", "last", "loading", "old", "stranger", "again", "second"}
LATE |= {LIMIT, *BAD, *CUT}


NOTICEABLE_S = 1.0  # seconds; a request that waits less for another one counts as not delayed
DELAYED = 0.8  # part of the other request's time: a request that takes longer has waited for it
BESIDE = ("own", "good")  # requests that come together with one whose peer does not answer
ALONE = ("met", "after")  # requests of the same D whose peer answers, without others


def is_late(found: ScenarioObservation, lease_s: float, noticeable_s: float = NOTICEABLE_S) -> bool:
    """Whether the machine was too slow for some case to judge: a request ended so late that its lease was
    over, nobody looked at P's blocks in time, or it cannot be told whether a request waited for another one,
    see `hides_delay`.
    """
    return (
        bool(found.too_slow)
        or any(hides_delay(found, name, noticeable_s) for name in BESIDE)
        or any(found.numbers.get(why, 0.0) >= lease_s for why in UNREAD)
        or any(
            ended.finish and ended.ended - ended.prefill_added > lease_s
            for name, ended in found.decodes.items()
            if name not in LATE
        )
    )


def seconds(ended: DecodeResult) -> float:
    """Return how long a request took, without the time in which D waited for a core."""
    return ended.ended - ended.added - ended.core_wait


def hides_delay(found: ScenarioObservation, name: str, noticeable_s: float) -> bool:
    """Whether it cannot be told if a request has waited for "bad", whose peer does not answer.

    Both took about as long. The connector counts its patience by the clock, and D waited for a core for so
    much of that time that less than `noticeable_s` is left. A request of the same scenario whose peer answers
    (`ALONE`) was clearly faster: if none was, it is the machine that takes so long for any request.
    """
    bad, other = found.decodes.get("bad"), found.decodes.get(name)
    if bad is None or other is None or seconds(other) <= DELAYED * seconds(bad):
        return False
    alone = [found.decodes[one] for one in ALONE if one in found.decodes and found.decodes[one].finish]
    usual = min((one.ended - one.added for one in alone), default=0.0)
    return seconds(bad) <= noticeable_s < bad.ended - bad.added - usual


def _another(spec: ByteEngineSpec, what: str) -> ByteEngineSpec:
    """The engine with another model, dtype or rotary embedding (`what`), whose KV has the same size, or with
    another pool.
    """
    changes: dict[str, dict[str, Any]] = {
        "": {},
        "model": {"model": f"another-{spec.geometry}"},
        "dtype": {"dtype": "float16"},
        "rope": {"engine_arguments": spec.engine_arguments | ROPE},
        "pool": {"num_blocks": spec.num_blocks + MORE_BLOCKS},
    }
    return msgspec.structs.replace(spec, **changes[what])


def _calls_of(
    found: ScenarioObservation | None, calls: dict[str, tuple[HookCall, ...]]
) -> tuple[HookCall, ...]:
    """Of the calls of a scenario's engines, by name, those about its requests, and those that raised.

    Without a result of the scenario all of them: the last ones were before its end.
    """
    ids = set[str]()
    if found:
        ids |= {one.id for one in found.decodes.values()} | {one.id for one in found.prefills.values()}
        ids |= set(found.request_ids.values())
    return tuple(
        msgspec.structs.replace(call, side=name)
        for name, mine in calls.items()
        for call in mine
        if found is None
        or ids.intersection(call.requests)
        or any(id in f"{call.given} {call.answer}" for id in ids)
        or call.answer.startswith("raised ")
    )


class PeerBench:
    """Scenarios of one cell at a time, each with its engines."""

    def __init__(self, context: RunContext):
        self.context = context
        self._longer = 1  # how many times as long leases are, since a busy machine was too slow for them
        self._of_case, self._of_all = frozenset[str](), frozenset[str]()  # see `expect`
        # by cell and scenario, as `_seen`: calls of hooks
        self._calls: dict[tuple[Cell, str], tuple[HookCall, ...]] = {}
        self._seen: dict[tuple[Cell, str], ScenarioObservation | Blocked | HarnessError] = {}

    def expect(self, of_case: Iterable[str], of_all: Iterable[str]) -> None:
        """Name the scenarios that the next case observes, and those that all cases of its cell do."""
        self._of_case, self._of_all = frozenset(of_case), frozenset(of_all)

    def observe(self, cell: Cell, name: str) -> ScenarioObservation:
        """What a scenario shows in a cell.

        The first call runs all that cases of the cell observe, or those of `ON_THEIR_OWN`. Raises Blocked
        where engines do not start, and HarnessError for a scenario that the case has not declared.
        """
        if name not in self._of_case:
            raise HarnessError(f"the case observes the scenario {name}, and does not declare it")
        if (cell, name) not in self._seen:
            every = ON_THEIR_OWN if name in ON_THEIR_OWN else SCENARIOS[cell.topology]
            scenarios = together(every, self._of_all | {name})
            try:
                for one, seen in self._run_until_judged(cell, scenarios).items():
                    self._seen.setdefault((cell, one), seen)
            except (Blocked, HarnessError) as error:
                for one in scenarios:
                    self._seen.setdefault((cell, one), error)
        found = self._seen[cell, name]
        if isinstance(found, Exception):
            raise found
        self.context.shown_calls[:] = self._calls.get((cell, name), ())
        return found

    @property
    def lease_s(self) -> float:
        """Seconds for which P may keep blocks that no peer reads."""
        return self.context.lease_s(self._asked_lease_s)

    def require_short_lease(self) -> None:
        """Raise Blocked where the lease is longer than a run should wait.

        Scenarios that wait for the end of the lease do not run then.
        """
        self.context.require_short_lease(self._asked_lease_s)

    def scaled_seconds(self, seconds: float) -> float:
        """A wait inside a scenario: longer with --kv-timeout-scale, never shorter."""
        return self.context.scaled_seconds(seconds)

    def spec(self, name: str, cell: Cell) -> ByteEngineSpec:
        """How the engine of this name is built: "D-rope" as D, with another rotary embedding.

        NIXL of the engines `OVER_TCP` reads with P's help. Loads of the `LIMITED` may take `LOAD_S`.
        """
        longest = AT_ONCE * prompt_length(self.context)
        load_s = self.scaled_seconds(LOAD_S) if name in LIMITED else 0.0
        lease_s = self._asked_lease_s
        spec = byte_engine_spec(self.context, cell, name[0], longest, lease_s=lease_s, load_s=load_s)
        spec = _another(spec, name.partition("-")[2])
        more = over_tcp(self.context.facts.device) if name in OVER_TCP else {}
        return msgspec.structs.replace(spec, environment=spec.environment | more)

    @property
    def _asked_lease_s(self) -> float:
        """Seconds of the lease that the suite asks for."""
        return self.context.asked_lease_s(LEASE_S) * self._longer

    def _run_until_judged(
        self, cell: Cell, scenarios: dict[str, PeerScenario]
    ) -> dict[str, ScenarioObservation]:
        """Run scenarios of a cell; again with longer leases if a busy machine was too slow for them."""
        began, waited = time.monotonic(), own_core_wait()
        seen, noticeable_s = self._run(cell, scenarios), self.scaled_seconds(NOTICEABLE_S)
        busy = own_core_wait() - waited > BUSY * (time.monotonic() - began)
        late = any(is_late(found, self.lease_s, noticeable_s) for found in seen.values())
        if self._longer == 1 and busy and late:
            self._longer = LONGER
            self.context.progress("the machine is busy: running the scenarios again, with longer leases")
            seen = self._run(cell, scenarios)
        return seen

    def _run(self, cell: Cell, scenarios: dict[str, PeerScenario]) -> dict[str, ScenarioObservation]:
        """Run scenarios of a cell, all at once."""
        self.context.require_known_handover("protocol")
        self.context.require_nothing_missing()
        long_lease = self.context.has_long_lease(self._asked_lease_s)
        scenarios = {
            name: scenario
            for name, scenario in scenarios.items()
            if not scenario.waits_for_lease or not long_lease
        }
        self.context.running.end_all()  # the engines of other cells and rigs
        count = len(scenarios)
        what = f"{count} scenarios between peers, all at once" if count > 1 else "a scenario between peers"
        self.context.progress(f"running {what}")
        engines = ScenarioEngines(self, cell, self.context.deadlines, self.lease_s)
        try:
            first = [
                engines.start(name)
                for name in dict.fromkeys(
                    name for one in scenarios.values() for name in (*one.engines, *one.other_engines)
                )
            ]
            for name, scenario in scenarios.items():
                own = tuple(engines.by_name[engine] for engine in scenario.engines)
                others = tuple(engines.by_name[engine] for engine in scenario.other_engines)
                engines.running[name] = Script(
                    scenario.steps(engines, *own, *others),
                    own,
                    others if scenario.starts_early else tuple(first),
                    engines.running.get(scenario.after),
                )
            run(list(engines.running.values()), engines.all)
            observations = engines.observations()
            calls = {
                name: hook_calls(engine.handle)
                for name, engine in engines.by_name.items()
                if not engine.stopped  # it would not answer
            }
            logs = {name: engine.handle.process.exceptions(0) for name, engine in engines.by_name.items()}
        finally:
            engines.close()
        ended = [one for one in engines.running.values() if one.result]
        self.context.note("request", any(not d.finish for one in ended for d in one.result.decodes.values()))
        failures = [engine.failed for engine in engines.by_name.values() if engine.failed]
        self.context.note("call", any(failed.how == "hung" for failed in failures))
        refusals = (engine.failed for engine in first if engine.failed and engine.failed.how == "refused")
        if refused := next(refusals, None):
            raise blocked_by_start(cell, refused)
        for name, running in engines.running.items():
            mine = {engine: calls.get(engine, ()) for engine in scenarios[name].engines}
            self._calls[cell, name] = _calls_of(running.result, mine)
        return {
            name: replace(
                running.result or ScenarioObservation(),
                engines=observations,
                failed=running.failed,
                failed_engine=running.failed.engine if running.failed else "",
                started=running.started,
                stuck=running.stuck,
                log=tuple(f"{engine}: {line}" for engine in scenarios[name].engines for line in logs[engine]),
            )
            for name, running in engines.running.items()
        }
