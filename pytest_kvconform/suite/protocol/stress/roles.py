"""Engines that both send and receive, and data-parallel ranks."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, Violation
from pytest_kvconform.rigs.scheduler.live.config import LiveSpec
from pytest_kvconform.rigs.scheduler.live.pair import live_engines
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.protocol._scenarios import needs_hand_over
from pytest_kvconform.suite.protocol.stress._live import (
    declined,
    decode,
    in_full,
    loaded,
    plain,
    prefill,
    prompts_of,
    settle,
)


@case("KV-BOTH-001", applies=plain, rig="scheduler")
def two_engines_hand_over_both_ways(rig: Rig, variant: None) -> Evidence:
    """Both engines are kv_both. Each computes prompts for the other one, and loads at the same time."""
    needs_hand_over(rig)
    one, two = LiveSpec("P", both=True), LiveSpec("D", engine=1, port=1, both=True)
    try:
        with live_engines(rig, one, two) as live:
            block = rig.host.spec.memory["P"].block
            there = prompts_of(live, [3 * block + 5] * 3)
            back = prompts_of(live, [2 * block + 7] * 3, first=3)
            first, second = prefill(live, there), prefill(live, back, live.d)
            to_d = decode(live, there, first)
            to_p = decode(live, back, second, live.d, live.p)
            settle(live, to_d)
            settle(live, to_p, live.p)
            loaded(live, to_p, live.p)
            return loaded(live, to_d)
    except Violation as error:
        raise declined(error, "kv_both") from None


@case("KV-DP-001", applies=plain, variants=in_full, rig="scheduler")
def data_parallel_ranks_are_told_apart(rig: Rig, variant: None) -> Evidence:
    """P has two data-parallel ranks, with one configuration and one port. D loads from each of them."""
    needs_hand_over(rig)
    ranks = [LiveSpec("P", data_parallel_rank=rank, data_parallel_size=2) for rank in range(2)]
    try:
        with live_engines(rig, ranks[0], None, ranks[1]) as live:
            block = rig.host.spec.memory["P"].block
            prompts = prompts_of(live, [3 * block + 5] * 4)
            even = {owner: prompt for owner, prompt in prompts.items() if owner % 2 == 0}
            odd = {owner: prompt for owner, prompt in prompts.items() if owner % 2}
            other = live.others[0]
            first, second = prefill(live, even), prefill(live, odd, other)
            found = [*decode(live, even, first), *decode(live, odd, second, other)]
            settle(live, found)
            return loaded(live, found)
    except Violation as error:
        raise declined(error, "data-parallel ranks") from None
