"""Large block ids and offsets, long prompts, and wall clocks that differ or jump."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence
from pytest_kvconform.rigs.scheduler.live.config import LiveSpec
from pytest_kvconform.rigs.scheduler.live.pair import live_engines
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.protocol.stress._live import (
    decode,
    first_alone,
    loaded,
    plain,
    prefill,
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
)
def large_block_ids_and_offsets_arrive(rig: Rig, role: str) -> Evidence:
    """Blocks with ids above 2 ** 16, which lie more than 4 GiB behind the first one, are loaded as others.
    So is a prompt of many blocks.
    """
    blocks, longest, far = LONG + ROOM, LONG + 2, {role: FAR}
    p = LiveSpec("P", blocks=blocks, longest=longest, first_block=far.get("P", 0))
    d = LiveSpec("D", engine=1, port=1, blocks=blocks, longest=longest, first_block=far.get("D", 0))
    with live_engines(rig, p, d) as live:
        block = rig.host.spec.memory["D"].block
        ids: list[str] = []
        for lengths in ([3 * block + 5] * 2, [LONG * block + 5]):  # a wrong short prompt is found first
            prompts = prompts_of(live, lengths, first=len(ids))
            ids += decode(live, prompts, prefill(live, prompts))
            settle(live, ids)
            evidence = loaded(live, ids)
        return evidence


def _clocks(cell: Cell, matrix: str) -> tuple[str, ...]:
    return first_alone(cell, matrix, "p_jumps", "p_behind", "d_ahead", "d_jumps_back")


@case("KV-CLOCK-001", applies=plain, variants=_clocks, rig="scheduler")
def wall_clocks_may_differ_and_jump(rig: Rig, how: str) -> Evidence:
    """The wall clock of one engine is wrong by an hour, or jumps while blocks are kept or a load is under
    way. P computes other prompts meanwhile, which need any block that is free.
    """
    return _with_clocks(rig, how)


def _wrong(cell: Cell, matrix: str) -> tuple[str, ...]:
    return () if matrix == "quick" else ("p_behind", "d_ahead")


@case("KV-CLOCK-002", applies=plain, variants=_wrong, rig="scheduler")
def loads_are_made_although_clocks_differ(rig: Rig, how: str) -> Evidence:
    """D loads as before when the clock of one engine is wrong by an hour."""
    return _with_clocks(rig, how)


def _with_clocks(rig: Rig, how: str) -> Evidence:
    """Hand a prompt over, let a clock be wrong, and hand two over."""
    block = rig.host.spec.memory["P"].block
    with live_engines(rig, LiveSpec("P", blocks=24)) as live:
        before = prompts_of(live, [3 * block + 5], first=2)
        control = decode(live, before, prefill(live, before))
        settle(live, control)
        loaded(live, control)
        if how == "p_behind":
            live.p.set_clock_ahead(-HOUR_S)
        if how == "d_ahead":
            live.d.set_clock_ahead(HOUR_S)
        prompts = prompts_of(live, [3 * block + 5] * 2)
        ids = prefill(live, prompts)
        live.p.step(2)  # the workers learn that blocks are kept
        if how == "p_jumps":
            live.p.set_clock_ahead(HOUR_S)
        live.p.step(2)
        others = [
            live.p.add(prompt, owner) for owner, prompt in prompts_of(live, [3 * block] * 7, first=3).items()
        ]
        live.settle(lambda: live.p.ended(others), "other requests of P")
        found = decode(live, prompts, ids)
        if how == "d_jumps_back":
            live.d.step()
            live.d.set_clock_ahead(-HOUR_S)
        settle(live, found, released=False)  # P may keep what D did not load
        if rig.rule == "KV-CLOCK-002" and not any(live.d.announced(found).values()):
            raise rig.violation(
                "",
                f"D loads nothing since a wall clock is wrong by an hour ({how}), and did before",
            )
        return loaded(live, found)
