"""Many loads at once, and many requests one after the other."""

from __future__ import annotations

import math
from typing import Any

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.scheduler.live.config import LiveSpec, read_with_help
from pytest_kvconform.rigs.scheduler.live.pair import live_engines
from pytest_kvconform.rigs.scheduler.live.sizes import SHARE, growth
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.rigs.scheduler.violations import RELEASES
from pytest_kvconform.suite.protocol.stress._live import (
    Prompts,
    abort_once_admitted,
    decode,
    in_full,
    loaded,
    plain,
    prefill,
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


def _prompts(live: Any, count: int) -> Prompts:
    """Prompts of two blocks."""
    return prompts_of(live, [live.rig.host.spec.memory["D"].block + 5] * count)


@case("KV-MANY-001", applies=plain, variants=in_full, rig="scheduler")
def many_loads_in_flight_arrive(rig: Rig, variant: None) -> Evidence:
    """Many loads begin in one step of D, and each brings the KV of its own prompt."""
    with live_engines(rig) as live:
        prompts = _prompts(live, AT_ONCE)
        ids = decode(live, prompts, prefill(live, prompts))
        live.d.step()
        settle(live, ids)
        evidence = loaded(live, ids)
        for engine in live.engines:
            if left := engine.leaks():
                raise rig.violation(
                    "KV-FINISH-003", f"after {AT_ONCE} loads at once, on {engine.name()} {left[0]}"
                )
        return evidence


@case("KV-MANY-002", applies=plain, rig="scheduler")
def memory_of_both_halves_is_bounded(rig: Rig, variant: None) -> Evidence:
    """Over hundreds of requests no container of either half grows with their number, nor do the open files.

    The same prompts come again and again: what a store keeps of them does not grow either. P takes no step
    while D's requests are aborted, and on a CPU NIXL reads with its help.
    """
    read_with_help()
    with live_engines(rig, LiveSpec("P", blocks=P_BLOCKS)) as live:

        def grown() -> list[tuple[str, str]]:
            """Name of an engine and sentence about its connector, of those that have grown."""
            every = zip(live.engines, before, after, strict=True)
            found = ((engine.name(), growth(early, late, number)) for engine, early, late in every)
            return [(name, sentence) for name, sentence in found if sentence]

        prompts = _prompts(live, ROUND)
        before = _after(live, prompts, ROUNDS)
        after, number = _after(live, prompts, ROUNDS), ROUND * ROUNDS
        if grown():
            if (
                declared := rig.subject.remembers
            ):  # filled first, also where only some requests are remembered
                before = _after(live, _prompts(live, AT_ONCE), math.ceil(declared / SHARE / AT_ONCE))
                number = 0
            number += AT_ONCE * MORE
            after = _after(live, _prompts(live, AT_ONCE), MORE)
        if grown():
            for engine in live.engines:
                engine.set_clock_ahead(LATER_S, monotonic=True)
            after = _after(live, dict(list(prompts.items())[:2]), 1)
        for name, sentence in grown():
            raise rig.violation("", f"after {number} more requests, {name}: {sentence}")
        return Evidence(looked_at=2 * ROUND * ROUNDS, unit="requests", notes={"places": sum(map(len, after))})


def _after(live: Any, prompts: Prompts, rounds: int) -> list[dict[str, int]]:
    """What the connector remembers on each engine after so many rounds."""
    for _ in range(rounds):
        _round(live, prompts)
    return [engine.sizes() for engine in live.engines]


def _round(live: Any, prompts: Prompts) -> None:
    """Hand all prompts over at once; half of many are aborted while they load. Then the harness forgets them.

    P may keep the blocks of aborted ones until a lease ends: that is judged by other cases.
    """
    prefills = prefill(live, prompts)
    live.d.evict_prefix_cache()  # so that D loads all of each prompt in every round
    ids = decode(live, prompts, prefills)
    aborted = len(ids) // 2 if len(ids) >= ROUND else 0
    live.aborted |= set(list(prefills.values())[:aborted])
    with abort_once_admitted(live, ids[:aborted]):
        if aborted:  # D's workers hear of the aborts while they load
            live.d.step(2, alone_s=live.rig.scaled_seconds(ALONE_S))
        live.settle(lambda: live.d.ended(ids) and not live.d.kept(), "requests of D")
    live.settle(lambda: live.p.kept() <= live.aborted, RELEASES)
    live.check()
    for engine in live.engines:
        engine.step()
        engine.forget()
