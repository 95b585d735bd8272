"""Tell threads of one engine from those that stay once for a process, however many engines start in it.

A process of the tier engine has one engine. So engines without a model start and end in another process.
"""

from __future__ import annotations

import re
from collections import Counter

from model_matrix import expand
from pytest_kvconform.case_outcome import error_of
from pytest_kvconform.result import Blocked, Cell, Evidence, Outcome
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster, Steps
from pytest_kvconform.suite.interface import shutdown as interface
from pytest_kvconform.suite.interface._cells import cell_of_once, each_memory
from pytest_kvconform.suite.protocol.stress._live import hand_over_and_check, prompts_of

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
        end = bench.scripts.answer(cell, threads_after_hand_overs, RULE, variant)
        if end.outcome is Outcome.HARNESS:
            raise error_of(end)
        if end.evidence is None:
            why = why or (end.finding.happened if end.finding else end.reason)
            continue
        # a pool may have more threads here than there, so their numbers are not compared
        begun = [(name, end.evidence.notes.get(_without_numbers(name))) for name in left]
        leaks += [name for name, number in begun if number == 0]
        left = [name for name, number in begun if number is None]
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


def threads_after_hand_overs(cluster: Cluster, role: str) -> Steps:
    """Name the threads that hand-overs leave once for a process, however many engines of this role start and
    end in it: `notes` has name without numbers -> how many; 0 if the last engine has left a new thread of
    this name.

    It is no case. The threads of a pool that the first load or save begins are of this kind.
    """
    yield from cluster.start()
    engine = cluster.p if role == "P" else cluster.d
    earlier: dict[str, str] = {}  # id -> name of threads that engines before the last one have left
    new: dict[str, str] = {}  # of those that the last one has left
    engines = 0
    while engines < ENGINES and (engines < 2 or new):
        if engines:
            yield from cluster.start_again(engine)
        engines += 1
        earlier |= new
        # a step with several loads may begin more threads than one with a single load
        lengths = PROMPTS * [2 * cluster.block(cluster.d) + 5]
        yield from hand_over_and_check(cluster, prompts_of(cluster, lengths, first=PROMPTS * engines))
        now, left = yield from engine.call("end_engine")
        new = {one: _without_numbers(now[one]) for one in left}
    stay = Counter(earlier[one] for one in now if one in earlier)
    return Evidence(looked_at=engines, unit="engines", notes={**stay, **dict.fromkeys(new.values(), 0)})


def _without_numbers(name: str) -> str:
    """The name of a thread without its numbers: Python counts the threads of a process, and a connector may
    name one by a UUID.
    """
    return re.sub(r"(?=[a-f]*\d)[0-9a-f]+", "N", name)
