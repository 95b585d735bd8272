"""Helpers of cases on the peer rig: a completed scenario, and the outcome of each of its requests."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from model_matrix import parse_topology
from pytest_kvconform import rules
from pytest_kvconform.kvspace.kinds import SAME
from pytest_kvconform.kvspace.pools.diagnose import count_pool, diagnose_pool
from pytest_kvconform.kvspace.pools.draw import draw_pool
from pytest_kvconform.result import Blocked, Cell, Evidence, Finding, HarnessError, NotApplicable, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.bytes.faulty.messages import EngineObservation
from pytest_kvconform.rigs.cluster.peers.bench import seconds
from pytest_kvconform.rigs.cluster.peers.scenario_engines import (
    NO_TRANSFER,
    DecodeResult,
    ScenarioObservation,
)
from pytest_kvconform.rigs.cluster.peers.scenarios import scenario_named
from pytest_kvconform.suite.bytes._observations import wrong_words
from pytest_kvconform.suite.bytes._stores import is_store

# outcomes of a request
RIGHT, COMPUTED, REFUSED, WRONG, STUCK = ("right", "computed", "refused", "wrong", "stuck")


def one_rank(cell: Cell) -> bool:
    """Whether P and D have one rank each: in this cell many engines run side by side."""
    return cell.topology == "P1D1"


def one_rank_of_d(cell: Cell) -> bool:
    """Whether D has one rank. P may have several."""
    return parse_topology(cell.topology)[1] == 1


def observe(bench: Bench, name: str) -> ScenarioObservation:
    """Observe a scenario, whatever its outcome. Raises NotApplicable for a store."""
    has_peers(bench)
    return bench.peers.observe(bench.cell, name)


def has_peers(bench: Bench) -> None:
    """Raise NotApplicable for a store."""
    if is_store(bench):
        raise NotApplicable("a store has no peers: the engine that saved a prompt may be gone")


def engines_of(bench: Bench, name: str, roles: str = "PD") -> tuple[str, ...]:
    """Return the names of a scenario's own engines in the cell, of these roles."""
    engines = scenario_named(bench.cell.topology, name).engines
    return tuple(engine for engine in engines if engine[0] in roles)


def completed(bench: Bench, name: str, rule: str, owns: Collection[str] | None = None) -> ScenarioObservation:
    """Observe a scenario that came to its end.

    `owns`: names of the engines whose failure breaks the rule; None: all of the scenario's own. Raises
    Violation if one of them failed. Raises NotApplicable if the connector need
    not have what the scenario is about. Raises Blocked if another engine failed, which another case reports,
    or if the scenario shows nothing.
    """
    observed = observe(bench, name)
    owns = engines_of(bench, name) if owns is None else owns
    if observed.failed:
        if not observed.started or observed.failed_engine not in owns:
            raise Blocked(f"an engine failed in another scenario: {observed.failed.sentence}")
        raise Violation(
            Finding(
                rule=broken_rule(rule, STUCK),
                happened=observed.failed.sentence,
                differs="; ".join(observed.failed.stack),
                diagnosis=observed.failed.sentence,
                log=observed.failed.log,
            )
        )
    if observed.stuck:
        raise Blocked(observed.stuck)
    if observed.unsupported == NO_TRANSFER:
        raise Blocked(observed.unsupported)
    if observed.unsupported:
        raise NotApplicable(observed.unsupported)
    return observed


def engine(observed: ScenarioObservation, name: str) -> EngineObservation:
    """Return what an engine did in all scenarios.

    Raises Blocked if the engine failed: another case reports why.
    """
    if name not in observed.engines:
        raise Blocked(f"engine {name} failed in another scenario, and its reports are lost")
    return observed.engines[name]


def outcome_of(ended: DecodeResult) -> str:
    """Return how a request ended: RIGHT, COMPUTED, REFUSED, WRONG or STUCK.

    RIGHT: D loaded every byte. COMPUTED: D computed the prompt. REFUSED: the request ended with an error.
    """
    if not ended.finish:
        return STUCK
    if ended.finish == "error":
        return REFUSED
    if not ended.trace.external_tokens or ended.trace.first_computed <= ended.trace.local_tokens:
        return COMPUTED
    if not sum(check.rows_due for check in ended.checks):
        raise HarnessError("D loaded something, and no rank compared it")
    return WRONG if any(wrong_words(check, "attention") for check in ended.checks) else RIGHT


def was_overwritten(ended: DecodeResult) -> bool:
    """Whether all wrong words of a request are those of later requests of P: their numbers are larger."""
    runs = [check.pool.runs[check.pool.runs["kind"] != SAME] for check in ended.checks if check.pool.wrong]
    if not runs:
        return False
    found, due = (np.concatenate([one[which] for one in runs]) for which in ("found", "expected"))
    return len(found) > 0 and bool(((found["engine"] == 0) & (found["owner"] > due["owner"])).all())


def broken_rule(rule: str, what: str) -> str:
    """Return the id of the rule that a request with this outcome breaks, in a case of `rule`.

    A case of a SHOULD may find wrong bytes, a request that does not end or an engine that died. These break a
    MUST, whatever the case is about.
    """
    worse = {WRONG: "KV-BYTES-001", STUCK: "KV-HANDOVER-001"}.get(what, rule)
    return worse if rules.load()[rule].strength == "SHOULD" else rule


def violation(
    rule: str,
    happened: str,
    observed: ScenarioObservation,
    ended: DecodeResult | None = None,
    diagnosis: str = "",
) -> Violation:
    """Build the violation of a rule.

    If a request got wrong bytes, the finding shows them in a picture of D's pool.
    """
    wrong = next((check for check in (ended.checks if ended else ()) if check.pool.wrong), None)
    return Violation(
        Finding(
            rule=rule,
            happened=happened,
            differs=count_pool(wrong.pool) if wrong else "",
            picture=draw_pool(wrong.pool) if wrong else (),
            diagnosis=diagnosis or (diagnose_pool(wrong.pool) if wrong else ""),
            log=observed.log[-4:],
        )
    )


def check_right(
    rule: str,
    observed: ScenarioObservation,
    lease_s: float,
    requests: dict[str, str],
    after_failure: bool = False,
) -> int:
    """Return how many rows D loaded.

    `requests`: name in the scenario -> its name in a sentence. Raises Violation if a request is not RIGHT.
    `after_failure`: a load from the same P has failed before. D may compute these requests then: it may leave
    this P alone for a while.

    A request that ended more than a lease after P's request may find anything in P's blocks, or may be
    refused. The machine is too slow then, and the case is Blocked.
    """
    for name, words in requests.items():
        ended = observed.decodes[name]
        if (what := outcome_of(ended)) == RIGHT or (after_failure and what == COMPUTED):
            continue
        if what != STUCK and (age := ended.ended - ended.prefill_added) > lease_s:
            slow = f"ended {age:.1f} s after P's request had come, and the lease is {lease_s:.0f} s"
            raise Blocked(f"{words} {slow}: --kv-timeout-scale makes it longer")
        if what == COMPUTED:
            require_some_load(observed)
        diagnosis = "" if what == WRONG else _last(observed)
        raise violation(broken_rule(rule, what), f"{words} {_WORDS[what]}", observed, ended, diagnosis)
    return sum(check.rows_due for name in requests for check in observed.decodes[name].checks)


def require_some_load(observed: ScenarioObservation) -> None:
    """Raise Blocked if D ended every request and loaded nothing for any of them."""
    ends = observed.decodes.values()
    if ends and all(ended.finish == "length" and not ended.trace.external_tokens for ended in ends):
        raise Blocked(
            f"D loads nothing of prompts of {max(ended.trace.prompt_tokens for ended in ends)} tokens, see "
            "KV-HANDOVER-002 and KV-HANDOVER-003: declare load_granularity or min_load, and the suite makes "
            "them long enough",
            refused=True,
        )


_WORDS = {
    COMPUTED: "was computed by D, although P had computed it",
    REFUSED: "ended with an error",
    WRONG: "loaded wrong bytes",
    STUCK: "did not end",
}


def _last(observed: ScenarioObservation) -> str:
    """Return the last exception that an engine logged."""
    role, _, reported = (observed.log or ("",))[-1].partition(": ")
    return f"{role[:1]} logged {reported}" if reported else ""


def evidence(
    looked_at: int, unit: str, observed: ScenarioObservation, **notes: float | int | str
) -> Evidence:
    """Build the evidence of a scenario, with the seconds of every request."""
    times = {f"{name}_s": round(seconds(ended), 3) for name, ended in observed.decodes.items()}
    moved = sum(
        check.bytes_due
        for ended in observed.decodes.values()
        for check in ended.checks
        if not check.pool.wrong
    )
    return Evidence(looked_at=looked_at, unit=unit, bytes_moved=moved, notes={**times, **notes})
