"""The shutdown of an engine ends every part of the connector."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence, Finding, Violation, blocked_by
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.scenario import Scenario
from pytest_kvconform.suite.engine._observations import completed, moved
from pytest_kvconform.suite.engine._scenarios import situations
from pytest_kvconform.suite.engine._threads import of_engines


@case("KV-SHUTDOWN-001", variants=lambda cell, matrix: situations(cell, matrix)[:1])
def no_threads_ports_or_processes_left(bench: Bench, scenario: Scenario) -> Evidence:
    """After a hand-over and a shutdown, no thread, listening port or process of the connector is left."""
    observed = completed(bench, scenario)
    try:
        ends = bench.engine.leftovers(bench.cell)
    except EngineFailed as failed:
        if failed.how == "refused":
            case = f"kv::engine/start::engines_start[{bench.cell}]"
            raise blocked_by(case, failed.sentence, failed.declined) from None
        raise Violation(
            Finding(
                rule="KV-SHUTDOWN-001", happened=failed.sentence, log=failed.log, diagnosis=failed.sentence
            )
        ) from None
    unknown: Blocked | None = None  # whose threads are left
    for role, left in zip("PD", ends, strict=True):
        if left.error:
            raise Violation(
                Finding(rule="KV-SHUTDOWN-001", happened=f"shutdown of {role} raised {left.error}")
            )
        threads: tuple[str, ...] = ()
        try:
            threads = left.threads and of_engines(bench, role, left.threads)
        except Blocked as blocked:
            unknown = blocked
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
    if unknown:
        raise unknown
    return Evidence(looked_at=2, unit="engines", bytes_moved=moved(observed))
