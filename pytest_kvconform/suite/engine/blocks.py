"""Blocks after a request has ended: both engines have freed everything."""

from __future__ import annotations

from functools import partial

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.scenario import Scenario
from pytest_kvconform.suite._released_blocks import check_all_freed, why_d_keeps
from pytest_kvconform.suite.engine._observations import completed, moved
from pytest_kvconform.suite.engine._scenarios import everything


@case("KV-BLOCKS-001", variants=everything)
def all_blocks_are_freed(bench: Bench, scenario: Scenario) -> Evidence:
    """Blocks of every KV cache group, and requests, are freed within seconds, without waiting for a lease.

    What D does not read P may keep until the lease ends: that breaks a SHOULD, if there are leases.
    """
    observed = completed(bench, scenario)
    assert observed.usage is not None
    usage = dict(zip("PD", observed.usage, strict=True))
    rule = "KV-BLOCKS-001"
    store = bench.subject.is_store
    if scenario.unread and not store and not observed.kept_before and not bench.subject.features.get("lease"):
        rule = "KV-ABORT-002" if scenario.abort else "KV-HIT-001"
    d_keeps = partial(why_d_keeps, bench)
    return check_all_freed(usage, observed.released, moved(observed), store, rule, d_keeps)
