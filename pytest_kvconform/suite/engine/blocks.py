"""When a request has ended, nothing of it is left in either engine."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, Finding, Violation
from pytest_kvconform.rigs.bench import RELEASE_S, Bench
from pytest_kvconform.rigs.scenario import Scenario
from pytest_kvconform.suite.engine._scenarios import everything
from pytest_kvconform.suite.engine._settled import moved, settled


@case("KV-BLOCKS-001", variants=everything)
def all_come_back(bench: Bench, scenario: Scenario) -> Evidence:
    """Blocks of every group and requests are free again within seconds, not when a lease runs out."""
    seen = settled(bench, scenario)
    assert seen.usage is not None
    for role, usage in zip("PD", seen.usage, strict=True):
        held = usage.total_blocks - usage.free_blocks
        groups = [f"group {g}: {', '.join(names)}" for g, names in enumerate(usage.group_requests) if names]
        if held or usage.requests or groups:
            raise Violation(
                Finding(
                    rule="KV-BLOCKS-001",
                    happened=f"{RELEASE_S * bench.settings.timeout_scale:.0f} s after the last token {role} still holds {held} of "
                    f"{usage.total_blocks} blocks and {len(usage.requests)} requests",
                    differs="; ".join(groups),
                    diagnosis="D never told P that it has read, or that it will not read, so P waits for the lease"
                    if role == "P"
                    else "the connector never reported the end of a load, so the scheduler keeps its blocks",
                    signature=f"{role} keeps blocks",
                )
            )
        if usage.unfinished:
            raise Violation(
                Finding(
                    rule="KV-BLOCKS-001",
                    happened=f"{role} holds nothing, and its scheduler still says that it has work",
                    diagnosis="has_pending_push_work or a finished request that is never reported keeps the engine stepping",
                )
            )
    return Evidence(
        looked_at=sum(usage.total_blocks for usage in seen.usage),
        unit="blocks",
        bytes_moved=moved(seen),
        notes={"seconds": round(seen.released_s, 3)},
    )
