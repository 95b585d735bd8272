"""When a request has ended, nothing of it is left in either engine."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.scenario import Scenario
from pytest_kvconform.suite._released_blocks import nothing_held
from pytest_kvconform.suite.engine._observations import moved, settled
from pytest_kvconform.suite.engine._scenarios import everything


@case("KV-BLOCKS-001", variants=everything)
def all_blocks_are_freed(bench: Bench, scenario: Scenario) -> Evidence:
    """Blocks of every group and requests are free again within seconds, not when a lease runs out."""
    seen = settled(bench, scenario)
    assert seen.usage is not None
    return nothing_held(seen.usage, bench.settings.timeout_scale, moved(seen), seen.released_s)
