"""Blocks after a request has ended: both engines have freed everything."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.scenario import Scenario
from pytest_kvconform.suite._released_blocks import check_all_freed
from pytest_kvconform.suite.engine._observations import completed, moved
from pytest_kvconform.suite.engine._scenarios import everything


@case("KV-BLOCKS-001", variants=everything)
def all_blocks_are_freed(bench: Bench, scenario: Scenario) -> Evidence:
    """Blocks of every KV cache group, and requests, are freed within seconds, without waiting for a lease."""
    observed = completed(bench, scenario)
    assert observed.usage is not None
    usage = dict(zip("PD", observed.usage, strict=True))
    return check_all_freed(usage, observed.released, moved(observed), bench.subject.is_store)
