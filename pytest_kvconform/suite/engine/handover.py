"""A hand-over comes to its end, and D takes what it is given."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, Finding, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.handover import Observation
from pytest_kvconform.rigs.scenario import Scenario
from pytest_kvconform.suite._spared import computed_what_it_had_to
from pytest_kvconform.suite.engine._scenarios import everything, transfers
from pytest_kvconform.suite.engine._settled import moved, settled


@case("KV-HANDOVER-001", variants=everything)
def completes(bench: Bench, scenario: Scenario) -> Evidence:
    """Every request ends, and no engine dies, hangs or raises on the way."""
    seen = bench.observe(scenario)
    if seen.failed:
        raise Violation(
            Finding(
                rule="KV-HANDOVER-001",
                happened=seen.failed.sentence,
                differs="; ".join(seen.failed.stack),
                diagnosis=seen.failed.sentence,
                log=seen.failed.log,
            )
        )
    if seen.stuck:
        raise Violation(
            Finding(
                rule="KV-HANDOVER-001",
                happened=f"{'; '.join(seen.stuck)} after {_waited(bench)}",
                diagnosis=_logged(seen) or ("the connector never reported the load as finished" if "REMOTE" in seen.stuck[0] else ""),
                log=seen.logged,
            )
        )
    ends = [r.got.finish for r in seen.requests if r.got]
    wrong = [
        f"{r.name} ended with {r.got.finish} after {len(r.got.tokens)} tokens"
        for r in seen.requests
        if r.got and (r.got.finish != "length" or len(r.got.tokens) != scenario.max_tokens)
    ]
    if wrong:
        happened = f"{'; '.join(wrong)}; {scenario.max_tokens} tokens were asked for"
        raise Violation(Finding(rule="KV-HANDOVER-001", happened=happened, diagnosis=_logged(seen), log=seen.logged))
    return Evidence(looked_at=max(1, len(ends)), unit="requests", bytes_moved=moved(seen))


def _logged(seen: Observation) -> str:
    """What an engine wrote to its log about an exception that nobody raised here; the last one is nearest to the end of the request."""
    role, _, said = (seen.logged or ("",))[-1].partition(": ")
    return f"{role} logged {said}" if said else ""


def _waited(bench: Bench) -> str:
    from pytest_kvconform.rigs.bench import REQUEST_S

    return f"{REQUEST_S * bench.settings.timeout_scale:.0f} s"


@case("KV-HANDOVER-002", variants=transfers)
def spares_computing(bench: Bench, scenario: Scenario) -> Evidence:
    """D computes what it was not given, and no more: counted in the scheduler's own output, not in what the connector says."""
    seen = settled(bench, scenario)
    return computed_what_it_had_to(seen.requests, seen.decoder.block_size, moved(seen))
