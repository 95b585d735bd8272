"""Engines start with the connector under test."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, Finding, Violation, blocked_by
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.suite.engine._scenarios import has_state, has_window


@case("KV-START-001")
def engines_start(bench: Bench, _: None) -> Evidence:
    """Both engines start."""
    try:
        p, d = bench.engine.facts_of_engines(bench.cell)
    except EngineFailed as failed:
        finding = Finding(
            rule="KV-START-001",
            happened=failed.sentence,
            log=failed.log,
            diagnosis=failed.sentence,
            declined=failed.refusal,
        )
        raise Violation(finding) from None
    return Evidence(
        looked_at=2,
        unit="engines",
        notes={
            "connector": d.connector,
            "backend": d.backend,
            "layout": d.layout,
            "block size": d.block_size,
            "groups": len(d.groups),
            "pool of P": p.num_blocks,
        },
    )


@case("KV-START-002", applies=lambda cell: has_window(cell) or has_state(cell))
def hybrid_allocator_stays_on(bench: Bench, _: None) -> Evidence:
    """The hybrid memory allocator stays on.

    vLLM turns it off without a message for a class that does not inherit SupportsHMA.
    """
    try:
        facts = bench.engine.facts_of_engines(bench.cell)
    except EngineFailed as failed:
        raise _stands_on_start(bench, failed) from None
    for role, engine in zip("PD", facts, strict=True):
        if not engine.hma or len(engine.groups) < 2:
            raise Violation(
                Finding(
                    rule="KV-START-002",
                    happened=f"{role} has {len(engine.groups)} KV cache group and the hybrid memory "
                    f"allocator is {'on' if engine.hma else 'off'}; this family has layers of several kinds",
                    diagnosis=f"{bench.facts.name} {'supports' if bench.facts.supports_hma else 'lacks'} HMA "
                    "in this configuration, as vLLM's supports_hma_config answers",
                )
            )
    return Evidence(looked_at=sum(len(engine.groups) for engine in facts), unit="groups")


def _stands_on_start(bench: Bench, failed: EngineFailed) -> Exception:
    """Build the Blocked of a case whose engines did not start."""
    return blocked_by(f"kv::engine/start::engines_start[{bench.cell}]", failed.sentence, failed.declined)
