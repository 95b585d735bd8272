"""Many loads at once, and many requests one after the other."""

from __future__ import annotations

import math

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.cluster.scripts.cluster import RELEASES, Cluster, Steps, Wanted
from pytest_kvconform.rigs.engine.sizes import SHARE, growth
from pytest_kvconform.suite.protocol.stress._live import (
    Prompts,
    hand_over,
    in_full,
    loaded,
    plain,
    prompts_of,
    settle,
)

AT_ONCE = 64  # loads in flight
ROUND = 32  # requests of a round: one half is aborted while it loads, and something may leak with each half
ROUNDS = 3  # before the memory is measured, and between
MORE = 8  # rounds of AT_ONCE, if something has grown: a memory of some hundred requests is right
P_BLOCKS = 1600  # of P, which may keep those of every load that was aborted until a lease ends
ALONE_S = 0.5  # in which P does not step beside a step of D; a connector may load within the step
LATER_S = 86_400.0  # a connector may forget requests after some time


def _prompts(cluster: Cluster, count: int) -> Prompts:
    """Prompts of two blocks."""
    return prompts_of(cluster, [cluster.block(cluster.d) + 5] * count)


@case("KV-MANY-001", applies=plain, variants=in_full, rig="scheduler", script=True)
def many_loads_in_flight_arrive(cluster: Cluster, variant: None) -> Steps:
    """Many loads begin in one step of D, and each brings the KV of its own prompt."""
    yield from cluster.start()
    ids = yield from hand_over(cluster, _prompts(cluster, AT_ONCE))
    yield from cluster.step(cluster.d)
    yield from settle(cluster, ids)
    evidence = yield from loaded(cluster, ids)
    for engine in cluster.engines:
        if left := (yield from cluster.left(engine)):
            happened = f"after {AT_ONCE} loads at once, on {engine.name} {left}"
            raise cluster.violation("KV-FINISH-003", happened)
    return evidence


@case("KV-MANY-002", applies=plain, rig="scheduler", script=True)
def memory_of_both_halves_is_bounded(cluster: Cluster, variant: None) -> Steps:
    """Over hundreds of requests no container of either half grows with their number, nor do the open files.

    The same prompts come again and again: what a store keeps of them does not grow either. P takes no step
    while D's requests are aborted, and on a CPU NIXL reads with its help.
    """
    yield from cluster.start(Wanted("P", blocks=P_BLOCKS, needs_help=True), Wanted("D", needs_help=True))

    def grown() -> list[tuple[str, str]]:
        """Name of an engine and sentence about its connector, of those that have grown."""
        every = zip(cluster.engines, before, after, strict=True)
        found = ((engine.name, growth(early, late, number)) for engine, early, late in every)
        return [(name, sentence) for name, sentence in found if sentence]

    prompts = _prompts(cluster, ROUND)
    before = yield from _after(cluster, prompts, ROUNDS)
    after, number = (yield from _after(cluster, prompts, ROUNDS)), ROUND * ROUNDS
    if grown():
        # what is declared is filled first, also where only some requests are remembered
        if declared := cluster.subject.remembers:
            rounds = math.ceil(declared / SHARE / AT_ONCE)
            before = yield from _after(cluster, _prompts(cluster, AT_ONCE), rounds)
            number = 0
        number += AT_ONCE * MORE
        after = yield from _after(cluster, _prompts(cluster, AT_ONCE), MORE)
    if grown():
        for engine in cluster.engines:
            yield from engine.call("set_clock_ahead", LATER_S, True)
        after = yield from _after(cluster, dict(list(prompts.items())[:2]), 1)
    for name, sentence in grown():
        raise cluster.violation("", f"after {number} more requests, {name}: {sentence}")
    return Evidence(looked_at=2 * ROUND * ROUNDS, unit="requests", notes={"places": sum(map(len, after))})


def _after(cluster: Cluster, prompts: Prompts, rounds: int) -> Steps:
    """What the connector remembers on each engine after so many rounds."""
    for _ in range(rounds):
        yield from _round(cluster, prompts)
    sizes = []
    for engine in cluster.engines:
        sizes.append((yield from engine.call("sizes")))
    return sizes


def _round(cluster: Cluster, prompts: Prompts) -> Steps:
    """Hand all prompts over at once; half of many are aborted while they load.

    P may keep the blocks of aborted ones until a lease ends: that is judged by other cases.
    """
    p, d = cluster.p, cluster.d
    prefills = yield from cluster.prefill(prompts)
    yield from d.call("evict_prefix_cache")  # so that D loads all of each prompt in every round
    ids = yield from cluster.decode(prompts, prefills)
    aborted = len(ids) // 2 if len(ids) >= ROUND else 0
    cluster.aborted |= set(list(prefills.values())[:aborted])
    yield from d.call("abort_once_admitted", tuple(ids[:aborted]))
    if aborted:  # D's workers hear of the aborts while they load
        yield from cluster.step(d, 2, alone_s=cluster.context.scaled_seconds(ALONE_S))
    yield from cluster.settle(lambda: cluster.ended(d, ids) and not cluster.looks[d].kept, "requests of D")
    yield from d.call("abort_once_admitted", ())
    yield from cluster.settle(lambda: cluster.looks[p].kept <= cluster.aborted, RELEASES)
    yield from cluster.check()
    for engine in cluster.engines:
        yield from cluster.step(engine)
