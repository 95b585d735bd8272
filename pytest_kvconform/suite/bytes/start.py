"""Engines start with the connector, for the real geometry of every family."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, Finding, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.suite.bytes._transfers import longest


@case("KV-START-001")
def engines_start(bench: Bench, variant: None) -> Evidence:
    """Both engines start and register the memory of every layer on every rank."""
    try:
        p, d = bench.bytes.facts_of_engines(bench.cell, longest(bench.cell, bench.settings.matrix))
    except EngineFailed as failed:
        finding = Finding(
            rule="KV-START-001",
            happened=failed.sentence,
            differs="; ".join(failed.stack),
            diagnosis=failed.sentence,
            log=failed.log,
            declined=failed.refusal,
        )
        raise Violation(finding) from None
    return Evidence(
        looked_at=sum(len(group.layers) for facts in (p, d) for group in facts.groups), unit="layers"
    )
