"""The port on which P answers peers: whoever else speaks to it does no harm."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, HarnessError
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.peers.scenarios import QUESTIONS
from pytest_kvconform.suite.protocol._peers import all_right, evidence, look, one_rank


@case("KV-SIDE-001", applies=one_rank)
def outlives_nonsense(bench: Bench, variant: None) -> Evidence:
    """After a thousand messages that make no sense a D that P has never met gets what P has computed, and P lives."""
    seen = look(bench, "asked_nonsense", "KV-SIDE-001", "P3 D3")
    sent = int(seen.numbers["sent"])
    if sent < QUESTIONS // 2:
        raise HarnessError(f"{sent} of {QUESTIONS} messages could be sent to the port of P")
    words = f"after {sent} messages that make no sense to the port on which P listens, a request of a D that P has not met before"
    rows = all_right("KV-SIDE-001", seen, bench.pattern.limits.request, {"stranger": words})
    return evidence(rows, "rows", seen, messages=sent, ports=int(seen.numbers["ports"]))
