"""Leases: how long P keeps the blocks that it has handed over."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Cell, Evidence, blocked_by
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.peers.scenario_engines import KEEPS, ScenarioObservation
from pytest_kvconform.rigs.context import RELEASE_S
from pytest_kvconform.rigs.vllm_setup.hooks import RESULTS, SENDING
from pytest_kvconform.suite._peer_observations import (
    COMPUTED,
    REFUSED,
    RIGHT,
    STUCK,
    WRONG,
    broken_rule,
    check_right,
    completed,
    engine,
    engines_of,
    evidence,
    has_peers,
    observe,
    one_rank,
    one_rank_of_d,
    outcome_of,
    violation,
    was_overwritten,
)

LEASE_ENDS = {
    "lease_ends_before_load": "its lease had ended and P had overwritten its blocks before D read them",
    "lease_ends_during_load": "its lease ended and P overwrote its blocks while D was stopped during the "
    "load",
}
DURING = "lease_ends_during_load"
READS = "D uses what it has read from blocks whose lease had ended"
WRITES = "P frees blocks while it writes from them, and tells D nothing of it"
WAITS = {"queued_past_lease": "before it was scheduled", "loading_past_lease": "for its load to end"}
WITHOUT_FAULTS = ("lease_ends_before_load", "queued_past_lease")
DIAGNOSES = {
    "late": "P waits for a reader without a deadline",
    "behind": "P looks at its oldest leases, and stops at one that goes on",
}
LATE = "D does not renew the lease in time, or P does not keep the blocks although D does"
CHOSEN = "chosen"  # the request of D whose id has characters that separate words
CUTS = "requests with ordinary ids waited as long, and were right: some message, as a renewal, cuts ids apart"
NOT_READ = {"late": "", "behind": "; one that P had computed before it waits on D"}


def _variants(scenarios: dict[str, str], cell: Cell) -> tuple[str, ...]:
    """Return the scenarios of a cell: all where P has one rank, else those that hold no transfers."""
    return tuple(name for name in scenarios if one_rank(cell) or name in WITHOUT_FAULTS)


def _with_short_lease(bench: Bench, name: str, rule: str, roles: str = "PD") -> ScenarioObservation:
    """Observe a scenario with a short lease. `roles`: of the engines whose failure breaks the rule."""
    has_peers(bench)
    bench.peers.require_short_lease()
    return completed(bench, name, rule, engines_of(bench, name, roles))


def _freed(bench: Bench, name: str, rule: str, roles: str) -> ScenarioObservation:
    """Observe a scenario in which P has freed the blocks of its request."""
    observed = _with_short_lease(bench, name, rule, roles)
    if not observed.numbers["freed"]:
        case = "kv::protocol/peers/lease::expired_lease_frees_blocks"
        raise blocked_by(case, "P has not freed the blocks")
    return observed


@case(
    "KV-LEASE-001",
    rig="peers",
    applies=one_rank_of_d,
    variants=lambda cell, matrix: _variants(LEASE_ENDS, cell),
    scenarios=tuple(LEASE_ENDS),
)
def load_after_the_lease_is_detected(bench: Bench, variant: str) -> Evidence:
    """D refuses the request or computes it, and uses nothing that P has written since the lease."""
    copy = _hands_over_a_copy(bench)  # first: a finding shows the calls of what was observed last
    observed = _freed(bench, variant, "KV-LEASE-001", "D")
    ended = observed.decodes["late"]
    what = outcome_of(ended)
    if what in (STUCK, WRONG) or (what == RIGHT and not (copy or observed.numbers.get("of_p"))):
        since = what == WRONG and was_overwritten(ended)
        loaded = "loaded what P had written there since" if since else "loaded wrong bytes"
        words = {
            STUCK: "did not end",
            WRONG: f"{loaded}, and ended without an error",
            RIGHT: "loaded the right bytes although P had overwritten them, and it is not clear from where",
        }
        raise violation(
            "KV-LEASE-001",
            f"a request of D {words[what]}: {LEASE_ENDS[variant]}",
            observed,
            ended,
            diagnosis="" if not since else WRITES if observed.numbers.get("of_p") else READS,
        )
    return evidence(1, "requests", observed)


@case("KV-LEASE-002", rig="peers", applies=one_rank_of_d, scenarios=WITHOUT_FAULTS)
def expired_lease_frees_blocks(bench: Bench, variant: None) -> Evidence:
    """P frees blocks that no peer reads when their lease ends: not before, soon after, and once.

    A P that hands over a copy may free them at any time before: the lease is that of the copy.
    """
    copy = _hands_over_a_copy(bench)
    observed = _with_short_lease(bench, "lease_ends_before_load", "KV-LEASE-002", "")
    handed, kept = observed.prefills["late"], _kept(bench, observed, "late", observed.numbers["freed"], copy)
    p = engine(observed, *engines_of(bench, "lease_ends_before_load", "P"))
    for watched in p.ranks:
        if (times := len(watched.naming(RESULTS, SENDING, handed.id))) - p.times_taken(
            SENDING, handed.id
        ) > 1:
            raise violation(
                "KV-LEASE-002",
                f"rank {watched.rank} of P reported the request {times} times in finished_sending",
                observed,
            )
    # A connector may hold the blocks in vLLM's pool. The scheduler forgets the request then.
    if observed.numbers["known"] and (times := p.times_read(SENDING, handed.id)) != 1:
        raise violation(
            "KV-LEASE-002",
            f"P freed the blocks of the request, and its scheduler read the request {times} times in "
            "finished_sending",
            observed,
        )
    waits = observe(bench, "queued_past_lease")
    if "behind" not in waits.numbers:  # KV-LEASE-004 says why
        return evidence(1, "requests", observed, kept_s=round(kept, 3))
    behind = _kept(bench, waits, "behind", waits.numbers["behind"], copy)
    return evidence(2, "requests", observed, kept_s=round(kept, 3), behind_kept_s=round(behind, 3))


def _kept(bench: Bench, observed: ScenarioObservation, name: str, freed: float, copy: bool) -> float:
    """Return for how many seconds P has kept the blocks of a request that no peer has read.

    `freed`: when it no longer held them; 0.0: it does. Raises Violation if that is not when the lease ended.
    `copy`: P hands over a copy, and may free them before.
    """
    lease, kept = bench.peers.lease_s, freed - observed.prefills[name].added
    if not freed and observed.too_slow:
        raise Blocked(observed.too_slow)
    if not freed:
        raise violation(
            "KV-LEASE-002",
            "no peer read the blocks of a request, and "
            f"{lease + RELEASE_S * bench.settings.timeout_scale:.0f} s later P still holds them; their lease "
            f"is {lease:.0f} s{NOT_READ[name]}",
            observed,
            diagnosis=DIAGNOSES[name],
        )
    if kept < lease and not copy:
        raise violation(
            "KV-LEASE-002",
            f"P freed the blocks of a request {kept:.2f} s after the request had come, and their lease is "
            f"{lease:.0f} s",
            observed,
            diagnosis="the lease begins too early, is shorter than configured, or is set on one clock and "
            "counted on another",
        )
    return kept


def _hands_over_a_copy(bench: Bench) -> bool:
    """Whether D has loaded every byte of a prompt whose blocks P had freed and overwritten by then.

    Raises Blocked if D did not load it, and the lease of a copy was over.
    """
    has_peers(bench)
    bench.peers.require_short_lease()
    early, lease_s = observe(bench, "lease_ends_before_load").decodes.get("early"), bench.peers.lease_s
    what = early and outcome_of(early)
    if early and what in (COMPUTED, REFUSED) and (age := early.ended - early.prefill_added) > lease_s:
        raise Blocked(
            "P frees blocks before their lease ends. Whether it hands over a copy is not known: a request "
            f"of D ended {age:.1f} s after P's request had come, and the lease is {lease_s:.0f} s: "
            "--kv-timeout-scale makes it longer"
        )
    return what == RIGHT


@case("KV-LEASE-003", rig="peers", applies=one_rank_of_d, scenarios=tuple(LEASE_ENDS))
def late_notification_is_ignored(bench: Bench, variant: None) -> Evidence:
    """D reads, and notifies P, when P does not know the request any more.

    P goes on, and the next hand-over is right, or D computes that prompt.
    """
    looked_at = 0
    for name in _variants(LEASE_ENDS, bench.cell):
        if name == DURING and observe(bench, name).unsupported == KEEPS:
            continue  # the notification of such a load is not late
        observed = _freed(bench, name, "KV-LEASE-003", "P")
        after = {"after": f"{LEASE_ENDS[name]}: the next request of D"}
        failed = outcome_of(observed.decodes["late"]) == REFUSED
        looked_at += check_right("KV-LEASE-003", observed, bench.peers.lease_s, after, failed)
    return evidence(looked_at, "rows", observed) if looked_at else evidence(1, "requests", observed)


@case(
    "KV-LEASE-004",
    rig="peers",
    applies=one_rank_of_d,
    variants=lambda cell, matrix: _variants(WAITS, cell),
    scenarios=None,
)
def blocks_are_kept_while_d_waits(bench: Bench, variant: str) -> Evidence:
    """A request that waits on D for longer than a lease finds P's blocks unchanged."""
    observed = _with_short_lease(bench, variant, "KV-LEASE-004")
    if observed.too_slow:
        raise Blocked(observed.too_slow)
    # those with ordinary ids first: they tell more
    for name in sorted(observed.decodes, key=lambda name: name == CHOSEN):
        ended = observed.decodes[name]
        if (what := outcome_of(ended)) == RIGHT:
            continue
        since = what == WRONG and was_overwritten(ended)
        loaded = "loaded what P had written into the blocks since" if since else "loaded wrong bytes"
        words = {STUCK: "did not end", WRONG: loaded}.get(what, "did not load what P had computed")
        happened = (
            f"a request that waited {ended.ended - ended.added:.1f} s on D {WAITS[variant]} {words}; P's "
            f"lease is {bench.peers.lease_s:.0f} s"
        )
        if chosen := observed.prefills.get(CHOSEN):
            whose = "its id on P" if name == CHOSEN else "the id on P of another request that waited"
            happened += f"; {whose} was {chosen.id!r}"
        diagnosis = CUTS if name == CHOSEN else "" if what == WRONG and not since else LATE
        raise violation(broken_rule("KV-LEASE-004", what), happened, observed, ended, diagnosis=diagnosis)
    looked_at = sum(check.rows_due for ended in observed.decodes.values() for check in ended.checks)
    return evidence(looked_at, "rows", observed)
