"""Peers that are unreachable, slow, restarted, or sent malformed messages: only their own requests suffer."""

from __future__ import annotations

import functools
import math

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence, HarnessError, NotApplicable
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.peers.bench import DELAYED, NOTICEABLE_S, hides_delay, seconds
from pytest_kvconform.rigs.cluster.peers.scenario_engines import DecodeResult, loaded_within_step
from pytest_kvconform.rigs.cluster.peers.scenarios import BAD, CUT, MESSAGES, SLOW, STALL_S
from pytest_kvconform.rigs.context import REQUEST_S
from pytest_kvconform.suite._peer_observations import (
    COMPUTED,
    REFUSED,
    RIGHT,
    STUCK,
    WRONG,
    check_right,
    completed,
    engine,
    engines_of,
    evidence,
    observe,
    one_rank,
    outcome_of,
    violation,
)

HOOK = "start_load_kv"
PLACES = {
    "unreachable_peer": "no process listens on the port that its params name",
    "silent_peer": "the listener on the port that its params name never answers",
}
OTHER_LOADS = {
    "unreachable_peer": "a request whose P has shaken hands with D before",
    "silent_peer": "a request whose P answers, and has not shaken hands with D before,",
}
ONE_OF_TWO = "two such loads fail at about the same time, and the connector ends one of them alone as failed"
QUICK = 0.5  # part of a lease in which a D meets a P, on a machine that leaves time for it
of_places = functools.partial(
    case, rig="peers", applies=one_rank, variants=lambda cell, matrix: tuple(PLACES), scenarios=None
)
CUTS = {
    "accepted": "was reset as soon as it was accepted",
    "answering": "was reset in the middle of an answer of P",
}


@of_places("KV-PEER-001")
def unreachable_peer_fails_only_its_request(bench: Bench, variant: str) -> Evidence:
    """Requests whose P cannot be reached end, and the next request of D is right."""
    observed = completed(bench, variant, "KV-PEER-001", engines_of(bench, variant, "D"))
    ends = {name: outcome_of(observed.decodes[name]) for name in BAD if name in observed.decodes}
    alone = "" if len(set(ends.values())) == 1 else ONE_OF_TWO
    for bad, what in ((observed.decodes[name], what) for name, what in ends.items()):
        if what == STUCK:
            raise violation(
                "KV-PEER-001",
                f"a request of D did not end within {_limit(bench):.0f} s: {PLACES[variant]}",
                observed,
                diagnosis=alone
                or "the connector waits for an answer without a deadline; the request is "
                f"{bad.trace.status or 'not scheduled'}",
            )
        if what == WRONG:
            raise violation(
                "KV-PEER-001",
                f"a request of D loaded something, and {PLACES[variant]}",
                observed,
                bad,
                alone,
            )
    if RIGHT in ends.values():
        raise NotApplicable("D finds P's KV without the port that its params name")
    check_right(
        "KV-PEER-001",
        observed,
        bench.peers.lease_s,
        {"after": f"after this: {PLACES[variant]}: the next request of D"},
    )
    return evidence(len(observed.decodes), "requests", observed)


@of_places("KV-PEER-003")
def unreachable_peer_delays_no_other_request(bench: Bench, variant: str) -> Evidence:
    """A request that D computes itself does not wait until the other request has failed."""
    return _not_delayed("KV-PEER-003", bench, variant, {"own": "a request that D computes itself"})


@of_places("KV-PEER-004")
def unreachable_peer_delays_no_other_load(bench: Bench, variant: str) -> Evidence:
    """A request from another peer does not wait, either."""
    return _not_delayed("KV-PEER-004", bench, variant, {"good": OTHER_LOADS[variant]})


def _not_delayed(rule: str, bench: Bench, scenario: str, others: dict[str, str]) -> Evidence:
    observed = completed(bench, scenario, rule, ())
    if any(loaded_within_step(ended.trace) for ended in observed.decodes.values()):
        raise NotApplicable("D loads within the step that reads the KV: a step lasts as long as its loads")
    asked, noticeable_s = observed.decodes["bad"], bench.peers.scaled_seconds(NOTICEABLE_S)
    bad = seconds(asked)
    for name, words in others.items():
        ended = observed.decodes[name]
        if bad > noticeable_s and seconds(ended) > DELAYED * bad:
            raise violation(
                rule,
                f"{words} took {seconds(ended):.1f} s: it came together with one for which "
                f"{PLACES[scenario]}, and that took {bad:.1f} s",
                observed,
                diagnosis="one peer that cannot be reached delays requests that have nothing to do with it",
            )
        if hides_delay(observed, name, noticeable_s):
            raise Blocked(
                f"this machine was too slow to tell whether {words} waited for one for which "
                f"{PLACES[scenario]}: D waited for a core for {asked.core_wait:.1f} s of the "
                f"{asked.ended - asked.added:.1f} s that it took"
            )
    if "good" in others:
        check_right(rule, observed, bench.peers.lease_s, {"good": others["good"]})
    return evidence(len(others), "requests", observed)


@case(
    "KV-PEER-002",
    rig="peers",
    applies=one_rank,
    variants=lambda cell, matrix: ("met", "stranger"),
    scenarios=("restarted_peer",),
)
def restarted_peer_is_a_new_engine(bench: Bench, variant: str) -> Evidence:
    """What the old engine has handed over is refused, computed by D, or arrives from a copy that outlives it.

    What the new engine hands over arrives.
    """
    owns = ("P2", "P2b", "D2") if variant == "met" else ("D7",)
    observed = completed(bench, "restarted_peer", "KV-PEER-002", owns)
    old, new = {"met": ("old", "new"), "stranger": ("stranger", "new_stranger")}[variant]
    who = {"met": "a D that knows the old engine", "stranger": "a D that knows neither engine"}[variant]
    what = outcome_of(observed.decodes[old])
    if what in (STUCK, WRONG):
        words = "did not end" if what == STUCK else "loaded something that no engine has any more"
        raise violation(
            "KV-PEER-002",
            f"P was started again on the same port: a request of {who} for KV of the old engine {words}",
            observed,
        )
    check_right(
        "KV-PEER-002",
        observed,
        bench.peers.lease_s,
        {new: f"P was started again on the same port: a request of {who} for KV of the new engine"},
    )
    return evidence(2, "requests", observed)


@case("KV-PEER-006", rig="peers", applies=one_rank, scenarios=("restarted_peer",))
def load_ends_when_p_dies(bench: Bench, variant: None) -> Evidence:
    """P is stopped while D loads from it, and killed: the request of D ends, and D goes on."""
    observed = completed(bench, "restarted_peer", "KV-PEER-006", ("P2b", "D2"))
    ended = observed.decodes["interrupted"]
    if (what := outcome_of(ended)) in (STUCK, WRONG):
        words = "loaded wrong bytes" if what == WRONG else f"did not end within {_limit(bench):.0f} s"
        raise violation(
            "KV-PEER-006",
            f"P was stopped while a request of D loaded from it, and killed: the request {words}",
            observed,
            ended,
            "" if what == WRONG else "the connector waits without a deadline for a peer that is gone",
        )
    check_right(
        "KV-PEER-006",
        observed,
        bench.peers.lease_s,
        {"new": "P was killed during a load: the next request of D, from a new P,"},
    )
    return evidence(2, "requests", observed, interrupted=what)


@case(
    "KV-PEER-007",
    rig="peers",
    applies=one_rank,
    variants=lambda cell, matrix: CUT if matrix != "quick" else ("answering",),
    scenarios=("cut_connections",),
)
def broken_connection_fails_only_its_request(bench: Bench, moment: str) -> Evidence:
    """A request whose connections to P are reset ends, and later requests reach P."""
    observed = completed(bench, "cut_connections", "KV-PEER-007", engines_of(bench, "cut_connections", "D"))
    if not observed.numbers[moment]:
        raise NotApplicable(f"D made no connection to the port that P's params name that {CUTS[moment]}")
    ended = observed.decodes[moment]
    if (what := outcome_of(ended)) in (STUCK, WRONG):
        words = "loaded wrong bytes" if what == WRONG else f"did not end within {_limit(bench):.0f} s"
        raise violation(
            "KV-PEER-007",
            f"each connection of D to P {CUTS[moment]}: the request {words}",
            observed,
            ended,
            "" if what == WRONG else "the connector waits for an answer that cannot come any more",
        )
    check_right(
        "KV-PEER-007",
        observed,
        bench.peers.lease_s,
        {f"after_{moment}": f"each connection of D to P {CUTS[moment]}: a later request, without resets,"},
    )
    cut, refused = (int(observed.numbers[name]) for name in (moment, f"refused_{moment}"))
    return evidence(2, "requests", observed, ended=what, cut=cut, refused_later=refused)


def _limit(bench: Bench) -> float:
    """Seconds that a request may take."""
    return REQUEST_S * bench.settings.timeout_scale


@case(
    "KV-PEER-005",
    rig="peers",
    applies=one_rank,
    variants=lambda cell, matrix: ("meeting", "reading"),
    scenarios=("stopped_peer",),
)
def start_load_kv_does_not_wait_for_p(bench: Bench, variant: str) -> Evidence:
    """start_load_kv returns at once while P is stopped, and the load succeeds when P goes on."""
    observed = completed(bench, "stopped_peer", "KV-PEER-005")
    (d,) = engines_of(bench, "stopped_peer", "D")
    (watched,) = engine(observed, d).ranks
    first, end = (observed.numbers[f"{variant}_{word}"] for word in ("from", "to"))
    stopped = watched.longest(HOOK, first, end)
    calm = watched.longest(HOOK, observed.numbers["calm_from"], observed.numbers["calm_to"])
    if stopped is None or calm is None:
        when = "was stopped" if stopped is None else "went on"
        raise Blocked(f"D did not call start_load_kv once while P {when}, so that nothing was measured")
    (longest, at_least), (noise, _) = stopped, calm
    what = {"meeting": "D shook hands with it", "reading": "D read from it"}[variant]
    stall = bench.peers.scaled_seconds(STALL_S)
    if longest >= stall / 2:
        if noise >= stall / 4:
            raise Blocked(
                f"start_load_kv takes {noise:.2f} s on this machine even if P is not stopped, so the "
                "measurement shows nothing"
            )
        if at_least < stall / 2:
            raise Blocked(
                f"start_load_kv took {longest:.2f} s, in which other threads of D waited for a core: this "
                "machine was too slow to tell whether it waits for P"
            )
        raise violation(
            "KV-PEER-005",
            f"P was stopped for {end - first:.1f} s while {what}, and start_load_kv of D took {longest:.2f} "
            f"s; otherwise it takes at most {noise:.3f} s",
            observed,
            diagnosis="the worker half waits for the network on the thread that runs the model",
        )
    check_right(
        "KV-PEER-005",
        observed,
        bench.peers.lease_s,
        {variant: f"P was stopped for {end - first:.1f} s while {what}: the request"},
    )
    return evidence(
        len(watched.times[HOOK]),
        "calls",
        observed,
        longest_s=round(longest, 4),
        noise_s=round(noise, 4),
    )


@case(
    "KV-SIDE-001",
    rig="peers",
    applies=one_rank,
    scenarios=("hand_overs", "garbage_messages"),
)
def listener_survives_garbage_messages(bench: Bench, variant: None) -> Evidence:
    """After a thousand garbage messages P lives, and a new D loads what P has computed."""
    control = observe(bench, "hand_overs")  # first: a finding shows the calls of what was observed last
    observed = completed(bench, "garbage_messages", "KV-SIDE-001")
    sent = int(observed.numbers["sent"])
    if sent < MESSAGES // 2:
        raise HarnessError(f"{sent} of {MESSAGES} messages could be sent to the port of P")
    name = "again" if "again" in observed.decodes else "stranger"
    ended, words = observed.decodes[name], f"after {sent} garbage messages to the port on which P listens"
    _require_time_to_meet(
        ended, observed.numbers["waited"], control.decodes.get("first"), bench.peers.lease_s
    )
    rows = check_right("KV-SIDE-001", observed, math.inf, {name: f"{words}, a request of a new D"})
    return evidence(rows, "rows", observed, messages=sent, ports=int(observed.numbers["ports"]))


def _require_time_to_meet(
    ended: DecodeResult, waited: float, first: DecodeResult | None, lease_s: float
) -> None:
    """Raise Blocked if a request of a D that meets P ended without the right bytes, and time may be the
    reason.

    Wrong bytes: the lease was over. P may have overwritten its blocks, and that D reads them breaks a rule
    about leases. No load: P, D and the harness waited for a core for most of the time; or the lease was over,
    and no other D has met its P and loaded within QUICK leases (`first`).
    """
    took, age = ended.ended - ended.added, ended.ended - ended.prefill_added
    what, slow = outcome_of(ended), f"a request of a new D ended {age:.1f} s after P's request had come"
    if what == WRONG and age > lease_s:
        raise Blocked(
            f"{slow}, and the lease is {lease_s:.0f} s: P may have overwritten what D has read, see "
            "KV-LEASE-001. --kv-timeout-scale makes the lease longer"
        )
    if what not in (COMPUTED, REFUSED):
        return
    if waited >= SLOW * took:
        raise Blocked(f"this machine was too slow: {slow}, and engines waited for a core for {waited:.1f} s")
    quick = first is not None and first.ended - first.prefill_added < QUICK * lease_s
    if age > lease_s and not (first and quick and outcome_of(first) == RIGHT):
        raise Blocked(
            f"{slow}, the lease is {lease_s:.0f} s, and no other D has met a P and loaded from it in "
            f"{QUICK * lease_s:.1f} s: --kv-timeout-scale makes the lease longer"
        )
