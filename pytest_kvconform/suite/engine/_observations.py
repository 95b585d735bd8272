"""Observations with which most engine cases begin: a hand-over that reached its end."""

from __future__ import annotations

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.engine.observation import Observation
from pytest_kvconform.rigs.scenario import Scenario


def moved(observed: Observation) -> int:
    """Return how many bytes in D's cache equal P's and were not computed by D."""
    return sum(
        r.rows.compared_bytes
        for r in observed.requests
        if r.rows and not r.rows.wrong and r.decode.external_tokens
    )


def completed(bench: Bench, scenario: Scenario) -> Observation:
    """Observe a scenario in which every request came to its end. Otherwise raises Blocked."""
    observed = bench.engine.observe(bench.cell, scenario)
    if observed.failed or observed.stuck:
        # an engine died or hung, which is no clean refusal
        raise Blocked(f"depends on kv::engine/handover::completes[{bench.cell}-{scenario}]")
    return observed
