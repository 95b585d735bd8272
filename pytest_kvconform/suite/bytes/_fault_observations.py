"""Observations of transfers with faults, and what most cases about them look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pytest_kvconform.kvspace.kinds import UNWRITTEN
from pytest_kvconform.result import (
    Blocked,
    Evidence,
    Finding,
    HarnessError,
    NotApplicable,
    Violation,
    blocked_by,
)
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.bytes.faulty.ranks import hook_has
from pytest_kvconform.rigs.bytes.messages import Check
from pytest_kvconform.rigs.bytes.specs import alike, block_size
from pytest_kvconform.rigs.cluster.faults import FaultlessObservation, FaultObservation
from pytest_kvconform.rigs.cluster.transfer import Received, TransferObservation
from pytest_kvconform.rigs.context import LONGER
from pytest_kvconform.rigs.engine.messages import listed
from pytest_kvconform.rigs.scenario import LATE, NEVER, POLL, POST, STATUS, TWICE, Transfer
from pytest_kvconform.suite._load_amount import observe_long_enough
from pytest_kvconform.suite.bytes._observations import finding, moved, wrong_words
from pytest_kvconform.suite.bytes._stores import UNLIKE, is_store

Found = TypeVar("Found")
BLOCK = 16  # tokens: prompts are for such blocks, also where a block is as large as a state
NEEDS_FAULTS = "needs a connector that moves bytes with NIXL, or that has kvconform_fault (docs/stores.md)"


def require_faults(bench: Bench, transfer: Transfer) -> None:
    """Raise NotApplicable if the faults of a transfer cannot be set for the connector."""
    if is_store(bench) and not alike(bench.cell):
        raise NotApplicable(UNLIKE)
    if is_store(bench) and any(faults.notifications for faults in transfer.faults):
        raise NotApplicable("a store notifies no peer of the end of a load")
    means = bench.faults.means(bench.cell, transfer)
    if not means.agents and not means.hooks:
        if bench.subject.module is None and bench.subject.connector.startswith("Nixl"):
            raise HarnessError("vLLM's own NIXL connector made no agent that the suite can control")
        raise NotApplicable(NEEDS_FAULTS)
    if means.hooks and not all(map(hook_has, transfer.faults)):
        raise NotApplicable(f"kvconform_fault has no such fault: {fault_sentence(transfer)}")


def with_faults(bench: Bench, transfer: Transfer) -> FaultObservation:
    """Observe a transfer with faults.

    Raises NotApplicable if no fault can be set, Blocked if a fault affected nothing.
    """
    require_faults(bench, transfer)
    found, _ = observe(bench, transfer)
    report = found.reports[0] + found.reports[1]
    done = not (found.transfer.failed or found.transfer.stuck)
    if done and any(f.hold or f.late or f.fail for f in transfer.faults) and not report.changed:
        raise Blocked(
            f"{fault_sentence(transfer)}: the connector started no transfer that this fault is for "
            f"({report.transfers} in all)"
        )
    if done and any(f.fail for f in transfer.faults) and not report.failed:
        raise Blocked(f"{fault_sentence(transfer)}: no transfer failed, of the {report.transfers} that began")
    if done and any(f.notifications for f in transfer.faults) and not report.notifications:
        raise Blocked(f"{fault_sentence(transfer)}: no notification came, so none could be disturbed")
    return found


def observe(bench: Bench, transfer: Transfer) -> tuple[FaultObservation, int]:
    """Observe a transfer with faults. Its prompts are long enough for the connector's loads: returns also by
    how many tokens they are longer.
    """
    return _long_enough(
        bench,
        lambda by: bench.faults.observe(bench.cell, transfer, by),
        lambda found: _all_load(found.transfer) and (found.after is None or _all_load(found.after)),
    )


def without_faults(bench: Bench, transfer: Transfer) -> FaultlessObservation:
    """Observe a transfer without its faults. Its prompts are long enough for the connector's loads.

    Raises Blocked if it does not come to its end.
    """
    found, _ = _long_enough(
        bench,
        lambda by: bench.faults.without_faults(bench.cell, transfer, by),
        lambda found: _all_load(found.transfer),
    )
    if found.transfer.failed or found.transfer.stuck:
        raise Blocked(f"a transfer without faults did not end well: {_unfinished(found.transfer)}")
    return found


def _long_enough(
    bench: Bench, observe_longer: Callable[[int], Found], loads: Callable[[Found], bool]
) -> tuple[Found, int]:
    """Observe with prompts that are long enough for the connector's loads.

    `observe_longer`: tokens to add to each prompt -> the observation. `loads`: whether D loaded something for
    every request of an observation. Returns also how many tokens were added.
    """
    block = min(BLOCK, block_size(bench.cell, "D"))

    def to_add(found: Found) -> int:
        return LONGER if not loads(found) and loads(observe_longer(LONGER)) else 0

    return observe_long_enough(bench.subject, block, observe_longer, to_add)


def _all_load(observed: TransferObservation) -> bool:
    """Whether D loaded something for every request. True for a hand-over that did not end."""
    return bool(observed.failed or observed.stuck) or all(r.decode.external_tokens for r in observed.requests)


def _unfinished(observed: TransferObservation) -> str:
    return observed.failed.sentence if observed.failed else listed(observed.stuck)


def completed(bench: Bench, transfer: Transfer) -> FaultObservation:
    """Observe a transfer in which every request came to its end. Otherwise raises Blocked."""
    found = with_faults(bench, transfer)
    if found.transfer.failed or found.transfer.stuck:
        raise blocked_by(f"kv::bytes/transport_faults::every_request_ends[{bench.cell}-{transfer}]")
    return found


def failed_requests(observed: TransferObservation) -> list[Received]:
    """Return requests that ended with an error, or that D computed itself after KV was announced."""
    return [
        r
        for r in observed.requests
        if r.finish == "error"
        or (r.decode.external_tokens and r.decode.first_computed <= r.decode.local_tokens)
    ]


def d_hears_nothing(found: FaultObservation) -> bool:
    """Whether the message was lost by which D hears that P has written: D begins no transfer itself.

    D cannot tell such a load from one that failed.
    """
    lost = any(faults.notifications == NEVER for faults in found.transfer.transfer.faults)
    return lost and not found.reports[1].transfers


def load_right(bench: Bench, found: FaultObservation, rule: str) -> Evidence:
    """Return evidence of the requests for which D loaded KV.

    Raises Violation if a row is wrong: of KV-FAIL-007 where a load was reported as finished too early.
    """
    check_reported_in_time(bench, found)
    if not any(check.rows_due for check in all_checks(found.transfer)):
        if d_hears_nothing(found):
            raise NotApplicable("P writes, and D gave up loads of whose end it did not hear")
        begun = sum(r.decode.external_tokens > 0 for r in found.transfer.requests)
        if begun == 1 and any(side.failed for side in found.reports):
            raise NotApplicable("the only load of D is the one that was made to fail")
    return bytes_right(bench, found.transfer, rule)


def check_reported_in_time(bench: Bench, found: FaultObservation) -> None:
    """Raise Violation if a row or a state is wrong since a load was reported as finished too early."""
    for r in found.transfer.requests:
        for check in r.checks:
            if _is_wrong(check) and (early := _reported_early(found, r, check)):
                wrong = finding(bench, found.transfer, r, check, "KV-FAIL-007")
                happened, diagnosis = early
                raise Violation(
                    Finding(
                        rule="KV-FAIL-007",
                        happened=f"{fault_sentence(found.transfer.transfer)}: {r.name}: {happened}, and D "
                        "computed with what was not there yet",
                        differs=wrong.differs,
                        picture=wrong.picture,
                        diagnosis=diagnosis,
                        signature=diagnosis,
                    )
                )


def _reported_early(found: FaultObservation, r: Received, check: Check) -> tuple[str, str] | None:
    """Return what happened and why if a load was reported as finished before its last transfer had ended."""
    if UNWRITTEN not in check.pool.words or any(s.failed for s in found.reports):
        return None
    loads = [one for one in found.reports[1].loads if one.request == r.decode.id and one.ended < one.begun]
    for one in sorted(loads, key=lambda one: one.rank != check.rank):
        reported = f"rank {one.rank} of D reported its load as finished when"
        if one.ended:
            return (
                f"{reported} {one.ended} of the {one.begun} transfers that it had begun had ended",
                "a load is reported as soon as one of its transfers has ended, and not when all have",
            )
        return (
            f"{reported} none of the {one.begun} transfers that it had begun had ended",
            "a load is reported as soon as its transfers have begun, and not when they have ended",
        )
    if found.reports[0].hooks + found.reports[1].hooks:
        return (
            "D was told that its load had finished while a transfer was late",
            "a load is reported before the last of its transfers has ended",
        )
    return None


def _is_wrong(check: Check) -> bool:
    """Whether a row or a state that was due is not right."""
    return any(wrong_words(check, kind) for kind in ("attention", "state"))


def bytes_right(bench: Bench, observed: TransferObservation, rule: str) -> Evidence:
    """Return evidence of the requests for which D loaded KV.

    Raises Violation if a row or a state is wrong.
    """
    for r in observed.requests:
        for check in r.checks:
            if _is_wrong(check):
                raise Violation(finding(bench, observed, r, check, rule))
    due = sum(check.rows_due for r in observed.requests for check in r.checks)
    if not due:
        case = f"kv::bytes/transport_faults::every_request_ends[{bench.cell}-{observed.transfer}]"
        raise blocked_by(case, "D loaded nothing")
    return Evidence(
        looked_at=due, unit="rows", bytes_moved=moved(observed), notes={"seconds": round(observed.seconds, 3)}
    )


def all_checks(observed: TransferObservation) -> list[Check]:
    """Return all comparisons of D's pools.

    A difference is reported once, so a late write may be in the check of another request.
    """
    return [check for r in observed.requests for check in r.checks] + list(observed.audits[1])


def unnoticed(bench: Bench, transfer: Transfer, observed: TransferObservation) -> Finding | None:
    """Return a finding if a transfer failed and D went on as if it had not.

    None: the bytes are there, since the connector has tried again.
    """
    cause = "a transfer that failed is reported as if it had been made"
    for r in observed.requests:
        for check in r.checks:
            if _is_wrong(check):
                wrong = finding(bench, observed, r, check, "KV-FAIL-001")
                return Finding(
                    rule=wrong.rule,
                    happened=f"{fault_sentence(transfer)}, and {wrong.happened}",
                    differs=wrong.differs,
                    picture=wrong.picture,
                    diagnosis=f"{cause}: {wrong.diagnosis}",
                    signature=cause,
                )
    return None


def fault_sentence(transfer: Transfer) -> str:
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
