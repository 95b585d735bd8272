"""Two peers of one engine: a D with two P's loads from each of them, and a P with two D's serves both."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence, NotApplicable
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.peers.rank_scenarios import TURNS
from pytest_kvconform.suite._peer_observations import (
    RIGHT,
    check_right,
    completed,
    evidence,
    one_rank,
    outcome_of,
    violation,
)

LATER = 4.0  # times as long as after another load, and P still holds blocks
READERS = {"one": "the first D", "other": "the second D"}
AT_ONCE = "D loads from two P's at once: the request for KV of"
BEFORE = "D begins a load in the step after another one has ended: the request whose load has ended"
PEERS = {"one": "the first P", "other": "the second P, whose pool is larger,"}


@case("KV-PEER-009", rig="peers", applies=one_rank, scenarios=("two_peers",))
def each_load_is_from_its_own_peer(bench: Bench, variant: None) -> Evidence:
    """D loads from two P's with pools of different sizes: in turn, twice from each, and at once from both."""
    rule = "KV-PEER-009"
    observed = completed(bench, "two_peers", rule)
    requests = {
        f"{turn}_{name}": f"D loads from two P's in turn: the {turn} request for KV of {PEERS[name]}"
        for turn in TURNS
        for name in PEERS
    }
    requests |= {f"both_{name}": f"{AT_ONCE} {PEERS[name]}" for name in PEERS}
    requests |= {"before": BEFORE, "then": "the request whose load D begins then"}
    rows = check_right(rule, observed, bench.peers.lease_s, requests)
    return evidence(rows, "rows", observed)


@case("KV-BLOCKS-001", rig="peers", applies=one_rank, scenarios=("two_readers", "two_peers"))
def blocks_are_freed_whichever_d_loads(bench: Bench, variant: None) -> Evidence:
    """Two D's load from one P in turn, each twice, and one D from two P's in the same steps. Then this D
    begins a load in the step after another one has ended. Each P frees the blocks after each load.

    The load after which a P does that soonest shows how long it needs.
    """
    rule, lease_s = "KV-BLOCKS-001", bench.peers.lease_s
    observed = completed(bench, "two_readers", rule)
    requests = {
        f"{turn}_{name}": f"two D's load from one P in turn: the {turn} request of {READERS[name]}"
        for turn in TURNS
        for name in READERS
    }
    rows = check_right(rule, observed, lease_s, requests)
    at_once = completed(bench, "two_peers", rule, ())
    freed = {words: observed.numbers[name] for name, words in requests.items()}
    others = {f"both_{name}": f"{AT_ONCE} {PEERS[name]}" for name in PEERS} | {"before": BEFORE}
    freed |= {
        words: at_once.numbers[name]
        for name, words in others.items()
        if outcome_of(at_once.decodes[name]) == RIGHT  # of others another case reports
    }
    soonest, longest = min((one for one in freed.values() if one >= 0), default=lease_s), -min(freed.values())
    too_slow, kept = observed.too_slow or at_once.too_slow, longest >= LATER * soonest
    if (max(freed.values()) >= lease_s and not kept) or (longest > 0 and too_slow):
        raise Blocked(
            too_slow
            or f"the lease of {lease_s:.0f} s was over, or nearly, before it could be seen whether P is "
            "free: --kv-timeout-scale makes it longer"
        )
    if longest > 0 and not kept:
        raise NotApplicable(
            "P does not free the blocks of a load soon enough before the end of their lease of "
            f"{lease_s:.0f} s to see who makes it do that"
        )
    for words, seconds in freed.items():
        if seconds < 0:
            raise violation(
                rule,
                f"{words} was loaded, and {-seconds:.1f} s after P's request had come P still holds its "
                f"blocks. It has freed those of another one after {soonest:.1f} s",
                observed,
                diagnosis="if a step begins a load, D notifies no P in it"
                if words == BEFORE
                else "if loads from two P's end in one step, D notifies one of them"
                if words.startswith(AT_ONCE)
                else "P takes what one D says for what another one has said, or hears one of them alone",
            )
    return evidence(rows, "rows", observed, soonest_s=round(soonest, 3))
