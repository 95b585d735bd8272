"""What most engine cases begin with: an observation of a hand-over that reached its end."""

from __future__ import annotations

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.engine.observation import Observation
from pytest_kvconform.rigs.scenario import Scenario


def moved(observed: Observation) -> int:
    """Bytes that stand in D's cache, equal P's, and were not computed by D."""
    return sum(
        r.rows.compared_bytes
        for r in observed.requests
        if r.rows and not r.rows.wrong and r.decode.external_tokens
    )


def completed(bench: Bench, scenario: Scenario) -> Observation:
    """The observation, if every request of the scenario came to its end; otherwise Blocked, in one line."""
    observed = bench.engine.observe(bench.cell, scenario)
    if observed.failed or observed.stuck:
        raise Blocked(
            f"stands on kv::engine/handover::completes[{bench.cell}-{scenario}]"
        )  # which died or hung: no clean refusal
    return observed
