"""A transfer comes to its end, and D takes what it is given."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, Finding, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.suite._outcomes import came_to_an_end, said_last
from pytest_kvconform.suite._recomputed_tokens import computed_what_it_had_to
from pytest_kvconform.suite.bytes._observations import look, moved, owed, settled
from pytest_kvconform.suite.bytes._stores import gave_back, is_store
from pytest_kvconform.suite.bytes._transfers import transfers


@case("KV-HANDOVER-001", variants=transfers)
def completes(bench: Bench, transfer: Transfer) -> Evidence:
    """Every request ends, no engine dies, hangs or raises, and the connector does not give up."""
    seen = look(bench, transfer)
    came_to_an_end(seen, bench.settings.timeout_scale)
    if seen.refused:
        first = next(r for r in seen.requests if r.finish == "error")
        finding = Finding(
            rule="KV-HANDOVER-001",
            happened=f"D ended {first.name} with an error: the connector gave its load up "
            f"({seen.prefiller.num_blocks} blocks of {seen.prefiller.block_size} tokens on P, {seen.decoder.num_blocks} of "
            f"{seen.decoder.block_size} on D)",
            diagnosis=said_last(seen) or "the connector gives up loads of this pair of engines",
            log=seen.logged,
            declined="the connector gave the load up, and no word is wrong" if seen.declined else "",
        )
        raise Violation(finding)
    return Evidence(looked_at=len(seen.requests), unit="requests", bytes_moved=moved(seen))


def _counted(cell: Cell, matrix: str) -> list[Transfer]:
    """All but one: a request that was preempted on D computes again, by then without the connector."""
    return [transfer for transfer in transfers(cell, matrix) if transfer.preempt != "D"]


@case("KV-HANDOVER-002", variants=_counted)
def d_computes_only_missing_tokens(bench: Bench, transfer: Transfer) -> Evidence:
    """D computes what it was not given, and no more."""
    seen = settled(bench, transfer)
    if is_store(bench):
        return gave_back(bench, seen, list(seen.requests), moved(seen))
    return computed_what_it_had_to(owed(bench, seen), seen.decoder.block_size, moved(seen))
