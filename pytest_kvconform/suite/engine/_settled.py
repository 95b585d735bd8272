"""What most engine cases begin with: an observation of a hand-over that reached its end."""

from __future__ import annotations

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.handover import Observation
from pytest_kvconform.rigs.scenario import Scenario


def settled(bench: Bench, scenario: Scenario) -> Observation:
    """The observation, if every request of the scenario came to its end; otherwise Blocked, in one line."""
    seen = bench.observe(scenario)
    if seen.failed or seen.stuck:
        raise Blocked(f"stands on kv::engine/handover::completes[{bench.cell}-{scenario}]")
    return seen
