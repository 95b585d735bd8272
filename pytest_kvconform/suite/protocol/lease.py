"""How long P keeps what it has handed over: no shorter than it has reported, no longer, and as long as D wants it."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.context import RELEASE_S
from pytest_kvconform.rigs.peers.scenario_engines import StorySeen
from pytest_kvconform.suite._peer_observations import (
    RIGHT,
    STUCK,
    WRONG,
    check_right,
    completed,
    engine,
    evidence,
    has_peers,
    one_rank,
    outcome_of,
    violation,
)

COMES = {
    "late": "its lease was over and P had overwritten its blocks before D came for them",
    "overtaken": "its lease ended, and P overwrote its blocks, while D stood still in the middle of the load",
}
OWNS = {"late": "D8", "overtaken": "D5"}
WAITS = {"waiting": "before it was scheduled", "loading": "for its load to end"}


def _with_short_lease(bench: Bench, name: str, rule: str, owns: str) -> StorySeen:
    has_peers(bench)
    bench.peers.require_short_lease()
    return completed(bench, name, rule, owns)


def _freed(bench: Bench, name: str, rule: str, owns: str) -> StorySeen:
    """A story in which P has given its blocks back."""
    observed = _with_short_lease(bench, name, rule, owns)
    if not observed.numbers["freed"]:
        raise Blocked(
            "stands on kv::protocol/lease::expired_lease_frees_blocks: P has not given the blocks back"
        )
    return observed


@case("KV-LEASE-001", rig="peers", applies=one_rank, variants=lambda cell, matrix: ("late", "overtaken"))
def load_after_the_lease_is_detected(bench: Bench, variant: str) -> Evidence:
    """D refuses the request, or computes it: it does not take what stands in the blocks by now for the prompt's."""
    observed = _freed(bench, variant, "KV-LEASE-001", OWNS[variant])
    ended = observed.requests["late"]
    if (what := outcome_of(ended)) in (STUCK, WRONG, RIGHT):
        words = {
            STUCK: "did not end",
            WRONG: "was given what stood there by then, and ended well",
            RIGHT: "was given what P had overwritten, it is not clear from where",
        }
        raise violation(
            "KV-LEASE-001",
            f"a request of D {words[what]}: {COMES[variant]}",
            observed,
            ended,
            diagnosis="D reads from blocks without knowing whether they are still P's, and cannot tell when it has read them"
            if what == WRONG
            else "",
        )
    return evidence(1, "requests", observed)


@case("KV-LEASE-002", rig="peers", applies=one_rank)
def expired_lease_frees_blocks(bench: Bench, variant: None) -> Evidence:
    """P gives back what nobody comes for, not before its lease is over, soon after, and once."""
    observed = _with_short_lease(bench, "late", "KV-LEASE-002", "")
    handed, lease = observed.handed["late"], bench.peers.lease_s
    kept = observed.numbers["freed"] - handed.added
    if not observed.numbers["freed"]:
        raise violation(
            "KV-LEASE-002",
            f"nobody came for a request, and {lease + RELEASE_S * bench.settings.timeout_scale:.0f} s later P still holds its blocks; its "
            f"lease is {lease:.0f} s",
            observed,
            diagnosis="P waits for a reader without a deadline",
        )
    if kept < lease:
        raise violation(
            "KV-LEASE-002",
            f"P gave the blocks of a request back {kept:.2f} s after the request had come, and its lease is {lease:.0f} s",
            observed,
            diagnosis="the lease begins too early, is shorter than configured, or is counted on another clock than it was stamped on",
        )
    for watched in engine(observed, "P6").watched:
        if (times := len(watched.said("sending", handed.id))) != 1:
            raise violation(
                "KV-LEASE-002",
                f"rank {watched.rank} of P reported the request {times} times in finished_sending",
                observed,
            )
    return evidence(1, "requests", observed, kept_s=round(kept, 3))


@case("KV-LEASE-003", rig="peers", applies=one_rank)
def late_notification_is_ignored(bench: Bench, variant: None) -> Evidence:
    """D reads, and says so, when P does not know the request any more: P goes on, and the next hand-over is right."""
    looked_at = 0
    for name in COMES:
        observed = _freed(bench, name, "KV-LEASE-003", "P6")
        looked_at += check_right(
            "KV-LEASE-003",
            observed,
            bench.peers.lease_s,
            {"after": f"{COMES[name]}: the next request of D"},
        )
    return evidence(looked_at, "rows", observed)


@case("KV-LEASE-004", rig="peers", applies=one_rank, variants=lambda cell, matrix: ("waiting", "loading"))
def blocks_are_kept_while_d_waits(bench: Bench, variant: str) -> Evidence:
    """A request that waits on D for longer than a lease finds its blocks as they were."""
    observed = _with_short_lease(bench, variant, "KV-LEASE-004", "P D6")
    if observed.slow:
        raise Blocked(observed.slow)
    ended, lease = observed.requests[variant], bench.peers.lease_s
    if (what := outcome_of(ended)) != RIGHT:
        words = {STUCK: "did not end", WRONG: "was given what stood in the blocks by then"}.get(
            what, "was not given what P had computed"
        )
        raise violation(
            "KV-LEASE-004",
            f"a request that waited {ended.ended - ended.added:.1f} s on D {WAITS[variant]} {words}; P's lease is {lease:.0f} s",
            observed,
            ended,
            diagnosis="D does not tell P in time that the request is still wanted, or P does not keep it for that",
        )
    return evidence(sum(check.rows_due for check in ended.checks), "rows", observed)
