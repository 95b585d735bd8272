"""Prompts that P has computed and of which D loads nothing: P is notified, and frees its blocks."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence, NotApplicable
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.peers.rank_scenarios import unread
from pytest_kvconform.suite._peer_observations import completed, evidence, require_some_load, violation

REASONS = {
    "waiting": "D aborted a request before it was scheduled, while D was paused",
    "asked": "D aborted a request while it waited for a block",
    "whole": "D's prefix cache had the whole prompt of a request",
    "dropped": "D computed the prompt of a request that must not read the prefix cache",
}


def _of(reasons: tuple[str, ...], matrix: str) -> list[str]:
    return [why for why in unread(matrix) if why in reasons]


@case(
    "KV-ABORT-002",
    rig="peers",
    variants=lambda cell, matrix: _of(("waiting", "asked"), matrix),
    scenarios=("nothing_to_load",),
)
def abort_before_the_load_frees_p(bench: Bench, why: str) -> Evidence:
    """D aborts a request before it had a block: P frees the blocks that it keeps for it."""
    return _p_frees(bench, why, "KV-ABORT-002")


@case(
    "KV-HIT-001",
    rig="peers",
    variants=lambda cell, matrix: _of(("whole", "dropped"), matrix),
    scenarios=("nothing_to_load",),
)
def p_is_freed_without_a_load(bench: Bench, why: str) -> Evidence:
    """D computes a prompt that P has computed: P frees the blocks that it keeps for it."""
    return _p_frees(bench, why, "KV-HIT-001")


def _p_frees(bench: Bench, why: str, rule: str) -> Evidence:
    observed = completed(bench, "nothing_to_load", rule)
    require_some_load(observed)
    ended = observed.decodes.get(why)
    if ended and (external := ended.trace.external_tokens) and why == "whole":
        raise NotApplicable(f"with all whole blocks of a prompt in D's own cache D loads {external} tokens")
    if observed.numbers[why] >= (lease := bench.peers.lease_s):
        raise Blocked(
            observed.too_slow
            or f"the lease of {lease:.0f} s was over, or nearly, before it could be seen whether P is free: "
            "--kv-timeout-scale makes it longer"
        )
    if observed.numbers[why] < 0:
        if observed.too_slow:
            raise Blocked(observed.too_slow)
        known = not bench.context.subject.features.get("lease")
        lasts = f", which it keeps for {lease:.0f} s if nobody reads them" if known else ""
        raise violation(
            rule,
            f"{REASONS[why]}, and {-observed.numbers[why]:.1f} s after P's request had come P still holds "
            f"its blocks{lasts}",
            observed,
            diagnosis="D does not notify P that it loads nothing",
        )
    return evidence(1, "requests", observed, freed_s=round(observed.numbers[why], 3))
