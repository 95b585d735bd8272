"""Connectors on a transport that is slow, fails, or repeats notifications.

Faults can be set for connectors that move bytes with NIXL, and for those that have `kvconform_fault`.
"""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.kvspace.kinds import COLLATERAL
from pytest_kvconform.kvspace.pools.diagnose import count_pool, diagnose_pool
from pytest_kvconform.kvspace.pools.draw import draw_pool
from pytest_kvconform.result import Evidence, Finding, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.transfer import TransferObservation
from pytest_kvconform.rigs.engine.messages import listed
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.suite._released_blocks import SAVES, why_d_keeps
from pytest_kvconform.suite.bytes._fault_observations import (
    all_checks,
    bytes_right,
    completed,
    d_hears_nothing,
    failed_requests,
    fault_sentence,
    load_right,
    observe,
    unnoticed,
    with_faults,
)
from pytest_kvconform.suite.bytes._fault_transfers import (
    all_transfers,
    failing,
    leaving_traces,
    not_reusing,
    repeating,
    reusing,
    waited_for,
)
from pytest_kvconform.suite.bytes._observations import moved
from pytest_kvconform.suite.bytes._stores import is_store

NOT_REPORTED = "a failed load was not reported in finished_recving by every rank"


@case("KV-FAIL-001", variants=all_transfers)
def every_request_ends(bench: Bench, transfer: Transfer) -> Evidence:
    """Every request ends as kv_load_failure_policy demands, and no engine dies, hangs or raises."""
    found = with_faults(bench, transfer)
    observed, failed = found.transfer, failed_requests(found.transfer)
    if observed.failed or observed.stuck:
        diagnosis = (
            observed.failed.sentence
            if observed.failed
            else "the connector reported a load neither as finished nor as failed"
        )
        raise Violation(
            Finding(
                rule="KV-FAIL-001",
                happened=f"{fault_sentence(transfer)}: "
                f"{observed.failed.sentence if observed.failed else listed(observed.stuck)}",
                differs="; ".join(observed.failed.stack) if observed.failed else "",
                diagnosis=diagnosis,
                log=observed.failed.log if observed.failed else observed.logged,
            )
        )
    broken = len(observed.requests) if d_hears_nothing(found) else sum(s.failed for s in found.reports)
    refused = [r.name for r in observed.requests if r.finish == "error"]
    if (refused and transfer.policy != "fail") or len(failed) > broken:
        raise Violation(
            Finding(
                rule="KV-FAIL-001",
                happened=f"{fault_sentence(transfer)}: D {'ended' if refused else 'computed'} "
                f"{' and '.join(r.name for r in failed)} {'with an error' if refused else 'itself'}, "
                f"kv_load_failure_policy is {transfer.policy}, and {broken or 'no'} "
                f"transfer{'s' * (broken > 1)} failed",
                diagnosis="the connector gives up a load that is only slow"
                if not broken
                else "the failure of one request ends others, too"
                if len(failed) > broken
                else "a failed load ends its request although D should compute it",
                log=observed.logged,
            )
        )
    if observed.failed_beside:
        raise Violation(
            Finding(
                rule="KV-FAIL-001",
                happened=f"{fault_sentence(transfer)}: D also ended a running request with an error, which "
                "shares a block of D's prefix cache with the request whose load failed",
                diagnosis="get_block_ids_with_load_errors names blocks that were not to be loaded",
                log=observed.logged,
            )
        )
    if transfer.fails and not failed and (as_if_made := unnoticed(bench, transfer, observed)):
        raise Violation(as_if_made)
    return Evidence(
        looked_at=len(observed.requests),
        unit="requests",
        bytes_moved=moved(observed),
        notes={"failed": len(failed)},
    )


@case("KV-BYTES-001", variants=not_reusing)
def attention_kv_arrives(bench: Bench, transfer: Transfer) -> Evidence:
    """KV that was loaded is right on every rank, whatever happened to the other request."""
    return load_right(bench, completed(bench, transfer), "KV-BYTES-001")


@case("KV-FAIL-002", variants=reusing)
def p_keeps_blocks_until_the_last_read(bench: Bench, transfer: Transfer) -> Evidence:
    """P keeps its blocks until the last transfer has read them: a slow transfer reads what P computed."""
    return load_right(bench, completed(bench, transfer), "KV-FAIL-002")


@case("KV-FAIL-003", variants=repeating)
def repeated_notification_counts_once(bench: Bench, transfer: Transfer) -> Evidence:
    """P keeps its blocks until the last transfer has read them, also if each notification comes twice."""
    return load_right(bench, completed(bench, transfer), "KV-FAIL-003")


@case("KV-FAIL-004", variants=failing)
def nothing_is_written_after_a_failed_load(bench: Bench, transfer: Transfer) -> Evidence:
    """After the end of a request whose load failed nothing changes in D's pool."""
    found = completed(bench, transfer)
    for check in (
        check
        for check in all_checks(found.transfer)
        if check.pool.words.get(COLLATERAL) or (not check.request and check.pool.wrong)
    ):
        raise Violation(
            Finding(
                rule="KV-FAIL-004",
                happened=f"{fault_sentence(transfer)}: after D had ended the request, rank {check.rank} of "
                "D found bytes in its pool that were not there before",
                differs=count_pool(check.pool),
                picture=draw_pool(check.pool),
                diagnosis="a load was reported as failed while one of its transfers was still under way, and "
                "its blocks were free by then",
            )
        )
    size = found.transfer.decoder.num_blocks
    return Evidence(
        looked_at=size * len(found.transfer.audits[1]), unit="blocks", bytes_moved=moved(found.transfer)
    )


@case("KV-FAIL-005", variants=waited_for)
def all_blocks_are_freed(bench: Bench, transfer: Transfer) -> Evidence:
    """D frees every block as soon as the request has ended, and P at the latest when its lease ends."""
    found = completed(bench, transfer)
    assert found.transfer.usage is not None
    assert found.transfer.released is not None
    p, d = found.transfer.usage
    if d.free_blocks != d.total_blocks or d.requests:
        raise Violation(
            Finding(
                rule="KV-FAIL-005",
                happened=f"{fault_sentence(transfer)}: {found.transfer.released.waited_s:.3g} s "
                f"later D still holds {d.total_blocks - d.free_blocks} of {d.total_blocks} blocks and "
                f"{len(d.requests)} requests",
                diagnosis=why_d_keeps(bench, d, found.transfer.released.waited_s, NOT_REPORTED),
            )
        )
    if kept := bench.faults.kept(bench.cell, transfer, observe(bench, transfer)[1]):
        over = f". P keeps requests although their lease of {bench.faults.lease_s:.0f} s has ended"
        store = is_store(bench)
        raise Violation(
            Finding(
                rule="KV-FAIL-005",
                happened=f"{fault_sentence(transfer)}: P still holds {len(kept)} of {len(transfer.prompts)} "
                f"requests{'' if store else over}",
                diagnosis=SAVES
                if store
                else "P waits for a notification that will not come, without a deadline",
            )
        )
    return Evidence(
        looked_at=d.total_blocks + p.total_blocks, unit="blocks", bytes_moved=moved(found.transfer)
    )


@case("KV-FAIL-006", variants=leaving_traces)
def next_transfer_is_right(bench: Bench, transfer: Transfer) -> Evidence:
    """Another prompt is handed over between the same engines without faults, and every byte is right."""
    after = completed(bench, transfer).after
    assert after is not None
    unfinished = after.failed.sentence if after.failed else listed(after.stuck) or after.refused
    if unfinished:
        raise _next_request(transfer, after, f"did not end well: {unfinished}")
    for check in [*all_checks(after), *after.audits[0]]:
        if not check.pool.words.get(COLLATERAL) and (check.request or not check.pool.wrong):
            continue
        raise Violation(
            Finding(
                rule="KV-FAIL-006",
                happened=f"after this: {fault_sentence(transfer)}: the next transfer changed bytes that "
                "were not due",
                differs=count_pool(check.pool),
                picture=draw_pool(check.pool),
                diagnosis=diagnose_pool(check.pool),
            )
        )
    if not after.loads:
        raise _next_request(
            transfer, after, "loaded nothing; D may compute what it could load for 10 s after a failure"
        )
    return bytes_right(bench, after, "KV-FAIL-006")


def _next_request(transfer: Transfer, after: TransferObservation, what: str) -> Violation:
    """What the next request of D did after a transfer with faults."""
    return Violation(
        Finding(
            rule="KV-FAIL-006",
            happened=f"after this: {fault_sentence(transfer)}: the next request of D {what}",
            log=after.failed.log if after.failed else after.logged,
        )
    )
