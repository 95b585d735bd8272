"""One D and two P's: D loads from each of them what that one has computed."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.peers.scenarios import TURNS
from pytest_kvconform.suite._peer_observations import check_right, completed, evidence, one_rank

PEERS = {"one": "the first P", "other": "the second P, whose pool is larger,"}


@case("KV-PEER-009", rig="peers", applies=one_rank)
def each_load_is_from_its_own_peer(bench: Bench, variant: None) -> Evidence:
    """D loads from two P's with pools of different sizes: in turn, twice from each, and at once from both."""
    rule = "KV-PEER-009"
    observed = completed(bench, "two_peers", rule, "P15 P15-pool D15")
    requests = {
        f"{turn}_{name}": f"D loads from two P's in turn: the {turn} request for KV of {PEERS[name]}"
        for turn in TURNS
        for name in PEERS
    }
    requests |= {
        f"both_{name}": f"D loads from two P's at once: the request for KV of {PEERS[name]}" for name in PEERS
    }
    rows = check_right(rule, observed, bench.peers.lease_s, requests)
    return evidence(rows, "rows", observed)
