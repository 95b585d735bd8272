"""P and D with different models whose KV has the same size: D does not use what P hands over."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.peers.scenarios import OTHERS
from pytest_kvconform.suite._peer_observations import (
    RIGHT,
    STUCK,
    WRONG,
    broken_rule,
    check_right,
    completed,
    evidence,
    one_rank,
    outcome_of,
    violation,
)

DIFFERENCES = {
    "model": "another model than P, of the same sizes",
    "dtype": "another dtype than P, of the same size",
    "rope": "another rotary embedding than P",
}
SAME = {"same": "the same model on P and D: a request of D"}


@case(
    "KV-PEER-008",
    rig="peers",
    applies=one_rank,
    variants=lambda cell, matrix: OTHERS if matrix != "quick" else OTHERS[:1],
    scenarios=("another_model",),
)
def kv_of_another_model_is_not_loaded(bench: Bench, what: str) -> Evidence:
    """A D with another model refuses what P hands over, or computes it. A D like P loads it."""
    rule = "KV-PEER-008"
    observed = completed(bench, "another_model", rule, (f"D-{what}",))
    check_right(rule, observed, bench.peers.lease_s, SAME)
    ended = observed.decodes[what]
    outcome = outcome_of(ended)
    if outcome == STUCK:
        raise violation(
            broken_rule(rule, STUCK),
            f"D has {DIFFERENCES[what]}: a request of D did not end",
            observed,
            diagnosis="the connector neither loads the KV nor reports the load as failed",
        )
    if outcome in (RIGHT, WRONG):
        loaded = ended.trace.external_tokens
        raise violation(
            rule,
            f"D has {DIFFERENCES[what]}: a request of D loaded {loaded} tokens that P had computed",
            observed,
            diagnosis="neither the handshake nor the kv_transfer_params tell D that P's model differs, or D "
            "does not compare it",
        )
    if ended.ended - ended.prefill_added > bench.peers.lease_s:
        raise Blocked("D asked so late that P's lease was over: --kv-timeout-scale makes it longer")
    return evidence(2, "requests", observed, ended=outcome)
