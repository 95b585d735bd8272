"""Tell threads of one engine from those that stay once for a process, however many engines start in it.

A process of the tier engine has one engine. So engines without a model start and end in another process.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.processes.linux import threads
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.interface import shutdown as interface
from pytest_kvconform.suite.interface._cells import cell_of_once
from pytest_kvconform.suite.protocol.stress._live import decode, prefill, prompts_of, settle

RULE = "KV-SHUTDOWN-001"
ENGINES = 3  # one after the other; a pool may have more threads after a second one, a leak after each


def of_engines(bench: Bench, role: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of those threads of an engine of this role that do not stay once for the process."""
    end = bench.scheduler.run(
        cell_of_once(), interface.__name__, interface.threads_of_the_process.__name__, RULE, None
    )
    once, left = Counter[str](), []
    for name, number in (end.evidence.notes if end.evidence else {}).items():
        once[_without_numbers(name)] += int(number)
    for name in names:
        if once[_without_numbers(name)]:
            once[_without_numbers(name)] -= 1
        else:
            left.append(name)
    if not left:
        return ()
    end = bench.scheduler.run(cell_of_once(), __name__, threads_after_hand_overs.__name__, RULE, role)
    stay = end.evidence.notes if end.evidence else {}
    return tuple(name for name in left if _without_numbers(name) not in stay)


def threads_after_hand_overs(rig: Rig, role: str) -> Evidence:
    """Count the threads that hand-overs leave once for a process, however many engines of this role start
    and end in it: `notes` has name without numbers -> how many.

    It is no case. A pool of the process, which the first load or save begins, is such threads.
    """
    from pytest_kvconform.rigs.scheduler.live.config import LiveSpec
    from pytest_kvconform.rigs.scheduler.live.pair import RemoteEngine

    other = LiveSpec("D", engine=1) if role == "P" else LiveSpec("P")
    peers = [] if rig.subject.is_store else [RemoteEngine(rig, other)]
    left: set[str] = set()  # ids
    counts: list[Counter[str]] = []
    try:
        for number in range(1, ENGINES + 1):
            left |= _left_by_hand_over(rig, role, number, peers)
            counts.append(Counter(_without_numbers(name) for one, name in threads().items() if one in left))
            if number > 1 and not counts[-1] - counts[-2]:
                break
    finally:
        for peer in peers:
            peer.end()
    stay = {name: number for name, number in counts[-1].items() if number <= counts[-2][name]}
    return Evidence(looked_at=len(counts), unit="engines", notes={**stay})


def _left_by_hand_over(rig: Rig, role: str, number: int, peers: list[Any]) -> set[str]:
    """Start an engine of this process, hand one prompt over, and end the engine.

    Returns the ids of the threads that the connector leaves. `peers`: the engine on the other side; none: a
    store.
    """
    from pytest_kvconform.rigs.scheduler.live.config import LiveSpec, live_config
    from pytest_kvconform.rigs.scheduler.live.engine import LiveEngine
    from pytest_kvconform.rigs.scheduler.live.pair import Live, step_together

    spec = LiveSpec(role if peers else "P", engine=int(bool(peers) and role == "D"), port=number)
    engine = LiveEngine(rig, spec, live_config(rig, spec))
    step_together(engine, peers)
    sides = {"P": engine, "D": engine} | {peer.spec.role: peer for peer in peers}
    live = Live(rig, sides["P"], sides["D"])
    prompts = prompts_of(live, [2 * rig.host.spec.memory["D"].block + 5], first=number)
    settle(live, decode(live, prompts, prefill(live, prompts)))
    had = engine.half.threads
    engine.close()
    del engine, sides, live
    interface.once_nothing(rig, lambda: [one for one in threads() if one not in had])
    return threads().keys() - had


def _without_numbers(name: str) -> str:
    """The name of a thread without its numbers: Python counts the threads of a process."""
    return re.sub(r"\d+", "N", name)
