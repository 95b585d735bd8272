"""A transfer comes to its end, and D loads what P has computed."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Cell, Evidence, Finding, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.transfer import TransferObservation
from pytest_kvconform.rigs.engine.messages import listed
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.suite._outcomes import check_all_ended, last_logged_exception
from pytest_kvconform.suite._recomputed_tokens import Loads
from pytest_kvconform.suite.bytes._observations import completed, loads_of, moved, observe, requests_owed_kv
from pytest_kvconform.suite.bytes._stores import is_store, requests_of_store
from pytest_kvconform.suite.bytes._transfers import transfers


@case("KV-HANDOVER-001", variants=transfers)
def completes(bench: Bench, transfer: Transfer) -> Evidence:
    """Every request ends, no engine dies, hangs or raises, and the connector does not give a load up."""
    observed = observe(bench, transfer)
    if observed.stuck and observed.copies_left:  # a GPU would have made them
        raise Blocked(
            f"{listed(observed.stuck)}: {bench.facts.stand_in}, and has {observed.copies_left} copies "
            "still to make, so whose failure it is cannot be told here"
        )
    check_all_ended(observed)
    if observed.refused:
        first = next(r for r in observed.requests if r.finish == "error")
        finding = Finding(
            rule="KV-HANDOVER-001",
            happened=f"D ended {first.name} with an error: the connector gave up its load "
            f"({observed.prefiller.num_blocks} blocks of {observed.prefiller.block_size} tokens on P, "
            f"{observed.decoder.num_blocks} of {observed.decoder.block_size} on D)",
            diagnosis=last_logged_exception(observed)
            or "the connector gives up loads of this pair of engines",
            log=observed.logged,
            declined="the connector gave up the load, and no word is wrong" if observed.declined else "",
        )
        raise Violation(finding)
    return Evidence(looked_at=len(observed.requests), unit="requests", bytes_moved=moved(observed))


def _counted(cell: Cell, matrix: str) -> list[Transfer]:
    """All transfers but one: a request that was preempted on D computes again, then without the connector."""
    return [transfer for transfer in transfers(cell, matrix) if transfer.preempt != "D"]


@case("KV-HANDOVER-002", variants=_counted)
def d_computes_only_missing_tokens(bench: Bench, transfer: Transfer) -> Evidence:
    """D loads KV, and computes only the tokens that it did not load."""
    observed = completed(bench, transfer)
    loads = _loads(bench, observed)
    loads.check()
    return loads.evidence(moved(observed))


@case("KV-HANDOVER-003", variants=_counted)
def d_loads_all_whole_blocks(bench: Bench, transfer: Transfer) -> Evidence:
    """D loads every whole block of the prompt, unless the connector declares how much it loads."""
    observed = completed(bench, transfer)
    loads = _loads(bench, observed)
    loads.check_all_whole_blocks(
        f"kv::bytes/handover::d_computes_only_missing_tokens[{bench.cell}-{transfer}]"
    )
    return loads.evidence(moved(observed))


def _loads(bench: Bench, observed: TransferObservation) -> Loads:
    requests = requests_of_store(bench, observed) if is_store(bench) else requests_owed_kv(bench, observed)
    return loads_of(bench, observed, requests)
