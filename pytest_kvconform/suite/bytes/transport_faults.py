"""Connectors on a transport that is slow, fails, or repeats notifications.

Faults can be set only for connectors that move bytes with NIXL.
"""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.kvspace.kinds import COLLATERAL
from pytest_kvconform.kvspace.pools.diagnose import count_pool, diagnose_pool
from pytest_kvconform.kvspace.pools.draw import draw_pool
from pytest_kvconform.result import Blocked, Evidence, Finding, HarnessError, NotApplicable, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.bytes.handover import Received, TransferObservation
from pytest_kvconform.rigs.bytes.messages import Check
from pytest_kvconform.rigs.bytes.specs import block_size
from pytest_kvconform.rigs.context import declared_addition, declared_amount
from pytest_kvconform.rigs.peers.fault_bench import FaultObservation
from pytest_kvconform.rigs.scenario import (
    LATE,
    NEVER,
    POLL,
    POST,
    STATUS,
    TWICE,
    Transfer,
)
from pytest_kvconform.suite._load_amount import LONGER
from pytest_kvconform.suite.bytes._fault_transfers import (
    all_transfers,
    failing,
    leaving_traces,
    not_reusing,
    repeating,
    reusing,
    waited_for,
)
from pytest_kvconform.suite.bytes._observations import finding, moved, wrong_words
from pytest_kvconform.suite.bytes._stores import is_store

NEEDS_NIXL = "needs a connector that moves bytes with NIXL: no agent was made"


@case("KV-FAIL-001", variants=all_transfers)
def every_request_ends(bench: Bench, transfer: Transfer) -> Evidence:
    """Every request ends as kv_load_failure_policy demands, and no engine dies, hangs or raises."""
    found = _with_faults(bench, transfer)
    observed, failed = found.transfer, _failed_requests(found.transfer)
    if observed.failed or observed.stuck:
        diagnosis = (
            observed.failed.sentence
            if observed.failed
            else "the connector reported a load neither as finished nor as failed"
        )
        raise Violation(
            Finding(
                rule="KV-FAIL-001",
                happened=f"{_fault_sentence(transfer)}: "
                f"{observed.failed.sentence if observed.failed else '; '.join(observed.stuck)}",
                differs="; ".join(observed.failed.stack) if observed.failed else "",
                diagnosis=diagnosis,
                log=observed.failed.log if observed.failed else observed.logged,
            )
        )
    broken, refused = (
        sum(s.failed for s in found.reports),
        [r.name for r in observed.requests if r.finish == "error"],
    )
    if (refused and transfer.policy != "fail") or len(failed) > broken:
        raise Violation(
            Finding(
                rule="KV-FAIL-001",
                happened=f"{_fault_sentence(transfer)}: D {'ended' if refused else 'computed'} "
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
    if transfer.fails and not failed and (unnoticed := _unnoticed(bench, transfer, observed)):
        raise Violation(unnoticed)
    return Evidence(
        looked_at=len(observed.requests),
        unit="requests",
        bytes_moved=moved(observed),
        notes={"failed": len(failed)},
    )


@case("KV-BYTES-001", variants=not_reusing)
def attention_kv_arrives(bench: Bench, transfer: Transfer) -> Evidence:
    """KV that was loaded is right on every rank, whatever happened to the other request."""
    return _bytes_right(bench, _completed(bench, transfer).transfer, "KV-BYTES-001")


@case("KV-FAIL-002", variants=reusing)
def p_keeps_blocks_until_the_last_read(bench: Bench, transfer: Transfer) -> Evidence:
    """P keeps its blocks until the last transfer has read them: a slow transfer reads what P computed."""
    return _bytes_right(bench, _completed(bench, transfer).transfer, "KV-FAIL-002")


@case("KV-FAIL-003", variants=repeating)
def repeated_notification_counts_once(bench: Bench, transfer: Transfer) -> Evidence:
    """P keeps its blocks until the last transfer has read them, also if each notification comes twice."""
    return _bytes_right(bench, _completed(bench, transfer).transfer, "KV-FAIL-003")


@case("KV-FAIL-004", variants=failing)
def nothing_is_written_after_a_failed_load(bench: Bench, transfer: Transfer) -> Evidence:
    """After the end of a request whose load failed nothing changes in D's pool."""
    found = _completed(bench, transfer)
    for check in (
        check
        for check in _all_checks(found.transfer)
        if check.pool.words.get(COLLATERAL) or (not check.request and check.pool.wrong)
    ):
        raise Violation(
            Finding(
                rule="KV-FAIL-004",
                happened=f"{_fault_sentence(transfer)}: after D had ended the request, rank {check.rank} of "
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
    found = _completed(bench, transfer)
    assert found.transfer.usage is not None
    assert found.transfer.released is not None
    p, d = found.transfer.usage
    if d.free_blocks != d.total_blocks or d.requests:
        raise Violation(
            Finding(
                rule="KV-FAIL-005",
                happened=f"{_fault_sentence(transfer)}: {found.transfer.released.waited_s:.3g} s "
                f"later D still holds {d.total_blocks - d.free_blocks} of {d.total_blocks} blocks and "
                f"{len(d.requests)} requests",
                diagnosis="a failed load was not reported in finished_recving by every rank",
            )
        )
    if kept := bench.faults.kept(bench.cell, transfer, _observe(bench, transfer)[1]):
        raise Violation(
            Finding(
                rule="KV-FAIL-005",
                happened=f"{_fault_sentence(transfer)}: P still holds {len(kept)} of {len(transfer.prompts)} "
                f"requests. P keeps requests although their lease of {bench.faults.lease_s:.0f} s has ended",
                diagnosis="P waits for a notification that will not come, without a deadline",
            )
        )
    return Evidence(
        looked_at=d.total_blocks + p.total_blocks, unit="blocks", bytes_moved=moved(found.transfer)
    )


@case("KV-FAIL-006", variants=leaving_traces)
def next_transfer_is_right(bench: Bench, transfer: Transfer) -> Evidence:
    """Another prompt is handed over between the same engines without faults, and every byte is right."""
    after = _completed(bench, transfer).after
    assert after is not None
    unfinished = after.failed.sentence if after.failed else "; ".join(after.stuck) or after.refused
    if unfinished or not sum(check.rows_due for r in after.requests for check in r.checks):
        raise Violation(
            Finding(
                rule="KV-FAIL-006",
                happened=f"after this: {_fault_sentence(transfer)}: the next request of D "
                + (f"did not end well: {unfinished}" if unfinished else "loaded nothing"),
                log=after.failed.log if after.failed else after.logged,
            )
        )
    for check in [*_all_checks(after), *after.audits[0]]:
        if not check.pool.words.get(COLLATERAL) and (check.request or not check.pool.wrong):
            continue
        raise Violation(
            Finding(
                rule="KV-FAIL-006",
                happened=f"after this: {_fault_sentence(transfer)}: the next transfer changed bytes that "
                "were not due",
                differs=count_pool(check.pool),
                picture=draw_pool(check.pool),
                diagnosis=diagnose_pool(check.pool),
            )
        )
    return _bytes_right(bench, after, "KV-FAIL-006")


def _with_faults(bench: Bench, transfer: Transfer) -> FaultObservation:
    """Observe a transfer with faults.

    Raises NotApplicable if no fault can be set, Blocked if a fault affected nothing.
    """
    if is_store(bench):
        raise NotApplicable(NEEDS_NIXL)
    if not bench.faults.agents(bench.cell, transfer.policy):
        if bench.subject.module is None and bench.subject.connector.startswith("Nixl"):
            raise HarnessError("vLLM's own NIXL connector made no agent that the suite can control")
        raise NotApplicable(NEEDS_NIXL)
    found, _ = _observe(bench, transfer)
    report = found.reports[0] + found.reports[1]
    done = not (found.transfer.failed or found.transfer.stuck)
    if done and any(f.hold or f.late or f.fail for f in transfer.faults) and not report.changed:
        raise Blocked(
            f"{_fault_sentence(transfer)}: the connector started no transfer that this fault is for "
            f"({report.transfers} in all)"
        )
    if done and any(f.notifications for f in transfer.faults) and not report.notifications:
        raise Blocked(f"{_fault_sentence(transfer)}: no notification came, so none could be disturbed")
    return found


def _observe(bench: Bench, transfer: Transfer) -> tuple[FaultObservation, int]:
    """Observe a transfer with faults. Its prompts are long enough for the connector's loads: returns also by
    how many tokens they are longer.
    """
    if declared_amount(bench.subject):
        by = declared_addition(bench.subject, block_size(bench.cell, "D"))
        return bench.faults.observe(bench.cell, transfer, by), by
    found = bench.faults.observe(bench.cell, transfer)
    if _all_load(found):
        return found, 0
    longer = bench.faults.observe(bench.cell, transfer, LONGER)
    return (longer, LONGER) if _all_load(longer) else (found, 0)


def _all_load(found: FaultObservation) -> bool:
    """Whether D loaded something for every request. True for a hand-over that did not end."""
    return all(
        bool(observed.failed or observed.stuck) or all(r.decode.external_tokens for r in observed.requests)
        for observed in (found.transfer, found.after)
        if observed is not None
    )


def _completed(bench: Bench, transfer: Transfer) -> FaultObservation:
    """Observe a transfer in which every request came to its end. Otherwise raises Blocked."""
    found = _with_faults(bench, transfer)
    if found.transfer.failed or found.transfer.stuck:
        raise Blocked(f"depends on kv::bytes/transport_faults::every_request_ends[{bench.cell}-{transfer}]")
    return found


def _failed_requests(observed: TransferObservation) -> list[Received]:
    """Return requests that ended with an error, or that D computed itself after KV was announced."""
    return [
        r
        for r in observed.requests
        if r.finish == "error"
        or (r.decode.external_tokens and r.decode.first_computed <= r.decode.local_tokens)
    ]


def _bytes_right(bench: Bench, observed: TransferObservation, rule: str) -> Evidence:
    """Return evidence of the requests for which D loaded KV. Raises Violation if a row is wrong."""
    for r in observed.requests:
        for check in r.checks:
            if wrong_words(check, "attention"):
                raise Violation(finding(bench, observed, r, check, rule))
    due = sum(check.rows_due for r in observed.requests for check in r.checks)
    if not due:
        raise Blocked(
            f"depends on kv::bytes/transport_faults::every_request_ends[{bench.cell}-{observed.transfer}]: D "
            "loaded nothing"
        )
    return Evidence(
        looked_at=due, unit="rows", bytes_moved=moved(observed), notes={"seconds": round(observed.seconds, 3)}
    )


def _all_checks(observed: TransferObservation) -> list[Check]:
    """Return all comparisons of D's pools.

    A difference is reported once, so a late write may be in the check of another request.
    """
    return [check for r in observed.requests for check in r.checks] + list(observed.audits[1])


def _unnoticed(bench: Bench, transfer: Transfer, observed: TransferObservation) -> Finding | None:
    """Return a finding if a transfer failed and D went on as if it had not.

    None: the bytes are there, since the connector has tried again.
    """
    cause = "a transfer that failed is reported as if it had been made"
    for r in observed.requests:
        for check in r.checks:
            if wrong_words(check, "attention"):
                wrong = finding(bench, observed, r, check, "KV-FAIL-001")
                return Finding(
                    rule=wrong.rule,
                    happened=f"{_fault_sentence(transfer)}, and {wrong.happened}",
                    differs=wrong.differs,
                    picture=wrong.picture,
                    diagnosis=f"{cause}: {wrong.diagnosis}",
                    signature=cause,
                )
    return None


def _fault_sentence(transfer: Transfer) -> str:
    """What the transport did, in words: "on rank 1 transfer 0 failed"."""
    sentences: list[str] = []
    for f in transfer.faults:
        where = f"on rank {', '.join(map(str, f.ranks))} " if f.ranks else ""
        every = "every other transfer" if sentences else "every transfer"
        which = f"transfer {', '.join(map(str, f.transfers))}" if f.transfers else every
        if f.fail:
            how = {
                STATUS: "ended in the state ERR",
                POST: "could not be started (transfer() raised)",
                POLL: "failed (check_xfer_state() raised)",
            }
            sentences.append(
                f"{where}{which} {how[f.fail]}"
                + (" and could not be cancelled for a while" if f.linger else "")
            )
        elif f.hold or f.late:
            sentences.append(
                f"{where}{which} {'was started' if f.hold else 'was reported as complete'} "
                f"{f.hold or f.late} rounds late"
            )
        if f.notifications:
            sentences.append(
                {
                    TWICE: "every notification came twice",
                    LATE: "notifications came late",
                    NEVER: "no notification came",
                }.get(f.notifications, "notifications came in another order")
            )
    return " and ".join(sentences)
