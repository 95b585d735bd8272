"""Tell threads of one engine from those that stay once for a process, however many engines start in it.

A process of the tier engine has one engine. So engines without a model start and end in another process.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from typing import Any

from model_matrix import expand
from pytest_kvconform.case_outcome import error_of
from pytest_kvconform.result import Blocked, Cell, Evidence, Outcome
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.processes.linux import threads
from pytest_kvconform.rigs.scheduler.live.config import LiveSpec, live_config
from pytest_kvconform.rigs.scheduler.live.pair import Live, RemoteEngine, start_engine, step_together
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.interface import shutdown as interface
from pytest_kvconform.suite.interface._cells import cell_of_once, each_memory
from pytest_kvconform.suite.protocol.stress._live import decode, loaded, prefill, prompts_of, settle

RULE = "KV-SHUTDOWN-001"
PROMPTS = 3  # that each engine hands over
# One after the other, at most: a pool may have one thread more after each one, up to PROMPTS of them. A leak
# has more threads after the last one, too.
ENGINES = PROMPTS + 1


def of_engines(bench: Bench, role: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of those threads of an engine of this role that do not stay once for the process.

    Raises Blocked if the hand-overs that tell could not run.
    """
    end = bench.scheduler.answer(cell_of_once(), interface.threads_of_the_process, RULE, None)
    once, left = Counter[str](), []
    for name, number in (end.evidence.notes if end.evidence else {}).items():
        once[_without_numbers(name)] += int(number)
    for name in names:
        if once[_without_numbers(name)]:
            once[_without_numbers(name)] -= 1
        else:
            left.append(name)
    variant = "P" if bench.subject.is_store else role
    leaks, why = list[str](), ""
    for cell in _cells_like(bench.cell):
        if not left:
            break
        end = bench.scheduler.answer(cell, threads_after_hand_overs, RULE, variant)
        if end.outcome is Outcome.HARNESS:
            raise error_of(end)
        if end.evidence is None:
            why = why or (end.finding.happened if end.finding else end.reason)
            continue
        # a pool may have more threads here than there, so their numbers are not compared
        begun = {name: end.evidence.notes.get(_without_numbers(name)) for name in left}
        leaks += [name for name, number in begun.items() if number == 0]
        left = [name for name in left if begun[name] is None]
    if left and not leaks:
        which = f"after shutdown {role} still has threads ({', '.join(left[:4])})"
        why = why or "no engine without a model begins such threads"
        raise Blocked(f"{which}, and whether they stay once for the process is not known: {why}")
    return tuple(leaks)


def _cells_like(cell: Cell) -> list[Cell]:
    """Cells whose hand-overs tell: that of one kind of attention, and one with the layers of this cell, where
    loads may begin more threads.
    """
    like = [
        Cell(place.family, place.topology, place.setup)
        for place in expand("full", [cell.family])
        if place.rig == "scheduler"
    ]
    return list(dict.fromkeys([cell_of_once(), *sorted(like, key=lambda one: not each_memory(one))[:1]]))


def threads_after_hand_overs(rig: Rig, role: str) -> Evidence:
    """Name the threads that hand-overs leave once for a process, however many engines of this role start and
    end in it: `notes` has name without numbers -> how many; 0 if the last engine has left a new thread of
    this name.

    It is no case. The threads of a pool that the first load or save begins are of this kind.
    """
    other = LiveSpec("D", engine=1) if role == "P" else LiveSpec("P")
    peers = [] if rig.subject.is_store else [RemoteEngine(rig, other)]
    earlier: dict[str, str] = {}  # id -> name of threads that engines before the last one have left
    new: dict[str, str] = {}  # of those that the last one has left
    engines = 0
    try:
        while engines < ENGINES and (engines < 2 or new):
            engines += 1
            earlier |= new
            new = _left_by_hand_over(rig, role, engines, peers)
    finally:
        for peer in peers:
            peer.end()
    stay = Counter(earlier[one] for one in threads() if one in earlier)
    return Evidence(looked_at=engines, unit="engines", notes={**stay, **dict.fromkeys(new.values(), 0)})


def _left_by_hand_over(rig: Rig, role: str, number: int, peers: list[Any]) -> dict[str, str]:
    """Start an engine of this process, hand prompts over, and end the engine.

    Returns id -> name without numbers of the threads that this engine leaves. `peers`: the engine on the
    other side; none: a store.
    """
    spec = LiveSpec(role if peers else "P", engine=int(bool(peers) and role == "D"), port=number)
    config = live_config(rig, spec)
    config.kv_transfer_config.engine_id = str(uuid.uuid4())  # each engine is another one for its peer
    engine = start_engine(rig, spec, config)
    step_together(engine, peers)
    sides = {"P": engine, "D": engine} | {peer.spec.role: peer for peer in peers}
    live = Live(rig, sides["P"], sides["D"])
    # a step with several loads may begin more threads than one with a single load
    lengths = PROMPTS * [2 * rig.host.spec.memory["D"].block + 5]
    prompts = prompts_of(live, lengths, first=PROMPTS * number)
    ids = decode(live, prompts, prefill(live, prompts))
    settle(live, ids)
    loaded(live, ids)
    had = engine.half.threads
    engine.close()
    for peer in peers:
        peer.peer = None
    engine.side.scheduler.connector = engine.side.connector = None  # some threads end with it
    del engine, sides, live
    interface.once_nothing(rig, lambda: [one for one in threads() if one not in had])
    return {one: _without_numbers(name) for one, name in threads().items() if one not in had}


def _without_numbers(name: str) -> str:
    """The name of a thread without its numbers: Python counts the threads of a process, and a connector may
    name one by a UUID.
    """
    return re.sub(r"(?=[a-f]*\d)[0-9a-f]+", "N", name)
