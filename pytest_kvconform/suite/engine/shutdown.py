"""The shutdown of an engine ends every part of the connector."""

from __future__ import annotations

import re
from collections import Counter

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence, Finding, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.scenario import Scenario
from pytest_kvconform.suite.engine._observations import completed, moved
from pytest_kvconform.suite.engine._scenarios import situations
from pytest_kvconform.suite.interface import shutdown as interface
from pytest_kvconform.suite.interface._cells import cell_of_once


@case("KV-SHUTDOWN-001", variants=lambda cell, matrix: situations(cell, matrix)[:1])
def no_threads_ports_or_processes_left(bench: Bench, scenario: Scenario) -> Evidence:
    """After a hand-over and a shutdown, no thread, listening port or process of the connector is left."""
    observed = completed(bench, scenario)
    try:
        ends = bench.engine.leftovers(bench.cell)
    except EngineFailed as failed:
        if failed.how == "refused":
            on = f"depends on kv::engine/start::engines_start[{bench.cell}]: {failed.sentence}"
            raise Blocked(on, refused=failed.declined) from None
        raise Violation(
            Finding(
                rule="KV-SHUTDOWN-001", happened=failed.sentence, log=failed.log, diagnosis=failed.sentence
            )
        ) from None
    for role, left in zip("PD", ends, strict=True):
        if left.error:
            raise Violation(
                Finding(rule="KV-SHUTDOWN-001", happened=f"shutdown of {role} raised {left.error}")
            )
        threads = left.threads and _of_engines(bench, left.threads)
        reported = [
            f"{len(things)} {what} ({', '.join(map(str, things[:4]))})"
            for what, things in (
                ("threads", threads),
                ("listening ports", left.listening),
                ("processes", left.children),
            )
            if things
        ]
        if reported:
            raise Violation(
                Finding(
                    rule="KV-SHUTDOWN-001",
                    happened=f"after shutdown {role} still has {' and '.join(reported)}",
                    diagnosis="shutdown() does not end what the constructor or register_kv_caches started",
                    signature=f"shutdown leaves {', '.join(s.split('(')[0].strip() for s in reported)}",
                )
            )
    return Evidence(looked_at=2, unit="engines", bytes_moved=moved(observed))


def _of_engines(bench: Bench, threads: tuple[str, ...]) -> tuple[str, ...]:
    """The names of those threads that do not stay once for the process, however many engines start in it.

    A process of this tier has one engine, so the tier interface tells: it starts several in one process.
    """
    end = bench.scheduler.run(
        cell_of_once(), interface.__name__, "threads_of_the_process", "KV-SHUTDOWN-001", None
    )
    once, left = Counter[str](), []
    for name, number in (end.evidence.notes if end.evidence else {}).items():
        once[_without_numbers(name)] += int(number)
    for name in threads:
        if once[_without_numbers(name)]:
            once[_without_numbers(name)] -= 1
        else:
            left.append(name)
    return tuple(left)


def _without_numbers(name: str) -> str:
    """The name of a thread without its numbers: Python counts the threads of a process."""
    return re.sub(r"\d+", "N", name)
