"""Large block ids and offsets, long prompts, and wall clocks that differ or jump."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster, Steps, Wanted
from pytest_kvconform.suite.protocol.stress._live import (
    first_alone,
    hand_over,
    hand_over_and_check,
    loaded,
    plain,
    prompts_of,
    settle,
)

FAR = 70_000  # blocks that are never used: ids above 2 ** 16, and 64 KiB each above 4 GiB
LONG = 520  # blocks of a long prompt: their number has ten bits, and there are more than 8,192 tokens
ROOM = 60  # blocks for the short prompts
HOUR_S = 3600.0


@case(
    "KV-NUMBERS-001",
    applies=plain,
    variants=lambda cell, matrix: first_alone(cell, matrix, "P", "D"),
    rig="scheduler",
    script=True,
)
def large_block_ids_and_offsets_arrive(cluster: Cluster, role: str) -> Steps:
    """Blocks with ids above 2 ** 16, which lie more than 4 GiB behind the first one, are loaded as others.
    So is a prompt of many blocks.
    """
    yield from cluster.start(
        *(
            Wanted(one, blocks=LONG + ROOM, longest=LONG + 2, first_block=FAR if one == role else 0)
            for one in "PD"
        )
    )
    block, ids = cluster.block(cluster.d), list[str]()
    for lengths in ([3 * block + 5] * 2, [LONG * block + 5]):  # a wrong short prompt is found first
        ids += yield from hand_over(cluster, prompts_of(cluster, lengths, first=len(ids)))
        yield from settle(cluster, ids)
        evidence = yield from loaded(cluster, ids)
    return evidence


def _clocks(cell: Cell, matrix: str) -> tuple[str, ...]:
    return first_alone(cell, matrix, "p_jumps", "p_behind", "d_ahead", "d_jumps_back")


@case("KV-CLOCK-001", applies=plain, variants=_clocks, rig="scheduler", script=True)
def wall_clocks_may_differ_and_jump(cluster: Cluster, how: str) -> Steps:
    """The wall clock of one engine is wrong by an hour, or jumps while blocks are kept or a load is under
    way. P computes other prompts meanwhile, which need any block that is free.
    """
    return (yield from _with_clocks(cluster, how))


def _wrong(cell: Cell, matrix: str) -> tuple[str, ...]:
    return () if matrix == "quick" else ("p_behind", "d_ahead")


@case("KV-CLOCK-002", applies=plain, variants=_wrong, rig="scheduler", script=True)
def loads_are_made_although_clocks_differ(cluster: Cluster, how: str) -> Steps:
    """D loads as before when the clock of one engine is wrong by an hour."""
    return (yield from _with_clocks(cluster, how))


def _with_clocks(cluster: Cluster, how: str) -> Steps:
    """Hand a prompt over, let a clock be wrong, and hand two over."""
    yield from cluster.start(Wanted("P", blocks=24))
    p, d, block = cluster.p, cluster.d, cluster.block(cluster.p)
    yield from hand_over_and_check(cluster, prompts_of(cluster, [3 * block + 5], first=2))
    if how == "p_behind":
        yield from p.call("set_clock_ahead", -HOUR_S)
    if how == "d_ahead":
        yield from d.call("set_clock_ahead", HOUR_S)
    prompts = prompts_of(cluster, [3 * block + 5] * 2)
    ids = yield from cluster.prefill(prompts)
    yield from cluster.step(p, 2)  # the workers learn that blocks are kept
    if how == "p_jumps":
        yield from p.call("set_clock_ahead", HOUR_S)
    yield from cluster.step(p, 2)
    others = []
    for owner, prompt in prompts_of(cluster, [3 * block] * 7, first=3).items():
        others.append((yield from cluster.add(p, prompt, owner)))
    yield from cluster.settle(lambda: cluster.ended(p, others), "other requests of P")
    found = yield from cluster.decode(prompts, ids)
    if how == "d_jumps_back":
        yield from cluster.step(d)
        yield from d.call("set_clock_ahead", -HOUR_S)
    yield from settle(cluster, found, released=False)  # P may keep what D did not load
    if cluster.rule == "KV-CLOCK-002" and not any((yield from cluster.announced(d, found)).values()):
        happened = f"D loads nothing since a wall clock is wrong by an hour ({how}), and did before"
        raise cluster.violation("", happened)
    return (yield from loaded(cluster, found))
