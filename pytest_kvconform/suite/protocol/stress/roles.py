"""Engines that both send and receive, and data-parallel ranks."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster, Steps, Wanted
from pytest_kvconform.suite.protocol._scenarios import needs_hand_over
from pytest_kvconform.suite.protocol.stress._live import in_full, loaded, plain, prompts_of, settle


@case("KV-BOTH-001", applies=plain, rig="scheduler", script=True)
def two_engines_hand_over_both_ways(cluster: Cluster, variant: None) -> Steps:
    """Both engines are kv_both. Each computes prompts for the other one, and loads at the same time."""
    needs_hand_over(cluster)
    yield from cluster.start(Wanted("P", both=True), Wanted("D", both=True), may_decline="kv_both")
    p, d, block = cluster.p, cluster.d, cluster.block(cluster.p)
    there, back = prompts_of(cluster, [3 * block + 5] * 3), prompts_of(cluster, [2 * block + 7] * 3, first=3)
    first = yield from cluster.prefill(there)
    second = yield from cluster.prefill(back, d)
    to_d = yield from cluster.decode(there, first)
    to_p = yield from cluster.decode(back, second, d, p)
    yield from settle(cluster, to_d)
    yield from settle(cluster, to_p, p)
    yield from loaded(cluster, to_p, p)
    return (yield from loaded(cluster, to_d))


@case("KV-DP-001", applies=plain, variants=in_full, rig="scheduler", script=True)
def data_parallel_ranks_are_told_apart(cluster: Cluster, variant: None) -> Steps:
    """P has two data-parallel ranks, with one configuration and one port. D loads from each of them."""
    needs_hand_over(cluster)
    ranks = [Wanted("P", data_parallel=(rank, 2)) for rank in range(2)]
    yield from cluster.start(ranks[0], Wanted("D"), ranks[1], may_decline="data-parallel ranks")
    prompts = prompts_of(cluster, [3 * cluster.block(cluster.p) + 5] * 4)
    even = {owner: prompt for owner, prompt in prompts.items() if owner % 2 == 0}
    odd = {owner: prompt for owner, prompt in prompts.items() if owner % 2}
    [other] = cluster.others
    first = yield from cluster.prefill(even)
    second = yield from cluster.prefill(odd, other)
    found = yield from cluster.decode(even, first)
    found += yield from cluster.decode(odd, second, other)
    yield from settle(cluster, found)
    return (yield from loaded(cluster, found))
