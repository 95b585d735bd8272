"""Connectors on a transport that is slow, fails, or repeats itself. Only connectors that move bytes with NIXL can be given one."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.kvspace.kinds import COLLATERAL
from pytest_kvconform.kvspace.pools.diagnose import count_pool, diagnose_pool
from pytest_kvconform.kvspace.pools.draw import draw_pool
from pytest_kvconform.result import Blocked, Cell, Evidence, Finding, HarnessError, NotApplicable, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.bytes.handover import Received, TransferObservation
from pytest_kvconform.rigs.bytes.messages import Check
from pytest_kvconform.rigs.context import RELEASE_S
from pytest_kvconform.rigs.peers.fault_bench import FaultObservation, leaves_traces
from pytest_kvconform.rigs.scenario import (
    LATE,
    NEVER,
    POLL,
    POST,
    REVERSED,
    STATUS,
    TWICE,
    Faults,
    Prompt,
    Transfer,
    tokens,
)
from pytest_kvconform.suite.bytes._observations import finding, moved, wrong_words
from pytest_kvconform.suite.bytes._stores import is_store

PROMPTS = (
    Prompt(tokens(20)),
    Prompt(tokens(36, seed=1)),
)  # the faults of one transfer are those of the first
SLOW = 20  # rounds; each lets both engines step once, so that whatever else is to happen has happened by then
NEEDS_NIXL = "needs a connector that moves bytes with NIXL: no agent was made"


def _slow(name: str, *faults: Faults, reuse: bool = False, policy: str = "fail") -> Transfer:
    return Transfer(name, PROMPTS, faults=faults, reuse=reuse, policy=policy)


def _failed(name: str, *faults: Faults, policy: str = "fail") -> Transfer:
    return Transfer(name, PROMPTS, faults=faults, fails=True, policy=policy)


FIRST = (0,)
# What is done in which cell: one rank each; several ranks of D; several transfers of one rank of D, and several KV cache groups. Each has
# one policy for failed loads, and so one pair of engines. What P keeps until its lease is over comes first: the rest takes that long.
TRANSFERS: dict[tuple[str, str, str], tuple[Transfer, ...]] = {
    ("llama3_1_8b", "P1D1", "b16"): (
        _failed(
            "failed", Faults(transfers=FIRST, fail=STATUS, hold=2), Faults(hold=SLOW)
        ),  # the other request is still loading
        _failed("not_begun", Faults(transfers=FIRST, fail=POST)),
        _failed("lingers", Faults(transfers=FIRST, fail=POLL, linger=SLOW)),
        _slow("not_notified", Faults(notifications=NEVER)),
        _slow("slow", Faults(hold=SLOW)),
        _slow("said_late", Faults(late=SLOW)),
        _slow("twice", Faults(notifications=TWICE)),
        _slow("twice_late", Faults(notifications=TWICE, delay=SLOW)),
        _slow("notified_late", Faults(notifications=LATE, delay=SLOW)),
    ),
    ("llama3_1_8b", "P1D2", "b16"): (
        _failed(
            "failed_rank",
            Faults(ranks=(1,), transfers=FIRST, fail=STATUS),
            Faults(ranks=(0,), hold=SLOW),
            policy="recompute",
        ),
        _slow("slow_rank", Faults(ranks=(1,), hold=SLOW), reuse=True, policy="recompute"),
        _slow(
            "twice_slow_rank",
            Faults(ranks=(1,), hold=SLOW),
            Faults(notifications=TWICE),
            reuse=True,
            policy="recompute",
        ),
        _slow("reversed", Faults(notifications=REVERSED, delay=SLOW), policy="recompute"),
    ),
    ("gpt_oss_20b", "P2D1", "b16"): (
        _failed("failed_handle", Faults(transfers=(1,), fail=POST), Faults(transfers=FIRST, hold=SLOW)),
        _slow("slow_handle", Faults(transfers=FIRST, hold=SLOW), reuse=True),
    ),
}


# NIXL is not known to repeat a notification by itself, so what hangs on that alone is not part of every run.
NOT_QUICK = ("twice_slow_rank",)


def _all(cell: Cell, matrix: str) -> tuple[Transfer, ...]:
    found = TRANSFERS.get((cell.family, cell.topology, cell.setup), ())
    return tuple(transfer for transfer in found if matrix != "quick" or transfer.name not in NOT_QUICK)


def _failing(cell: Cell, matrix: str) -> list[Transfer]:
    return [transfer for transfer in _all(cell, matrix) if transfer.fails]


def _reusing(cell: Cell, matrix: str) -> list[Transfer]:
    return [transfer for transfer in _all(cell, matrix) if transfer.reuse and not _repeats(transfer)]


def _repeating(cell: Cell, matrix: str) -> list[Transfer]:
    return [transfer for transfer in _all(cell, matrix) if transfer.reuse and _repeats(transfer)]


def _judged_by_bytes(cell: Cell, matrix: str) -> list[Transfer]:
    return [transfer for transfer in _all(cell, matrix) if not transfer.reuse]


def _waited_for(cell: Cell, matrix: str) -> list[Transfer]:
    """All but where several handles fail: what P keeps until its lease is over is the same there, and to wait for it takes two seconds."""
    return [transfer for transfer in _all(cell, matrix) if not transfer.fails or cell.topology != "P2D1"]


def _with_traces(cell: Cell, matrix: str) -> list[Transfer]:
    return [transfer for transfer in _all(cell, matrix) if leaves_traces(transfer)]


def _repeats(transfer: Transfer) -> bool:
    return any(faults.notifications == TWICE for faults in transfer.faults)


@case("KV-FAIL-001", variants=_all)
def every_request_ends(bench: Bench, transfer: Transfer) -> Evidence:
    """Every request ends as the policy says, and no engine dies, hangs or raises."""
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
                happened=f"{_story(transfer)}: {observed.failed.sentence if observed.failed else '; '.join(observed.stuck)}",
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
                happened=f"{_story(transfer)}: D {'ended' if refused else 'computed'} {' and '.join(r.name for r in failed)} "
                f"{'with an error' if refused else 'itself'}, kv_load_failure_policy is {transfer.policy}, and "
                f"{broken or 'no'} transfer{'s' * (broken > 1)} failed",
                diagnosis="the connector gives up a load that is only slow"
                if not broken
                else "the failure of one request ends others, too"
                if len(failed) > broken
                else "a failed load ends its request although D is to compute it",
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


@case("KV-BYTES-001", variants=_judged_by_bytes)
def attention_kv_arrives(bench: Bench, transfer: Transfer) -> Evidence:
    """What was loaded is right on every rank, whatever became of the other request."""
    return _bytes_right(bench, _completed(bench, transfer).transfer, "KV-BYTES-001")


@case("KV-FAIL-002", variants=_reusing)
def p_keeps_blocks_until_the_last_read(bench: Bench, transfer: Transfer) -> Evidence:
    """P's blocks are not free before the last transfer has read them: a slow one reads what P computed."""
    return _bytes_right(bench, _completed(bench, transfer).transfer, "KV-FAIL-002")


@case("KV-FAIL-003", variants=_repeating)
def repeated_notification_counts_once(bench: Bench, transfer: Transfer) -> Evidence:
    """The same when every notification comes twice."""
    return _bytes_right(bench, _completed(bench, transfer).transfer, "KV-FAIL-003")


@case("KV-FAIL-004", variants=_failing)
def nothing_is_written_after_a_failed_load(bench: Bench, transfer: Transfer) -> Evidence:
    """After the end of a request whose load failed nothing changes in D's pool."""
    found = _completed(bench, transfer)
    for check in (
        check
        for check in _others(found.transfer)
        if check.pool.words.get(COLLATERAL) or (not check.request and check.pool.wrong)
    ):
        raise Violation(
            Finding(
                rule="KV-FAIL-004",
                happened=f"{_story(transfer)}: after D had ended the request, rank {check.rank} of D found bytes in its pool that were not "
                "there before",
                differs=count_pool(check.pool),
                picture=draw_pool(check.pool),
                diagnosis="a load was reported as failed while one of its transfers was still under way, and its blocks were free by then",
            )
        )
    size = found.transfer.decoder.num_blocks
    return Evidence(
        looked_at=size * len(found.transfer.audits[1]), unit="blocks", bytes_moved=moved(found.transfer)
    )


@case("KV-FAIL-005", variants=_waited_for)
def all_blocks_are_freed(bench: Bench, transfer: Transfer) -> Evidence:
    """D gives every block back as soon as the request has ended, P at the latest when its lease is over."""
    found = _completed(bench, transfer)
    assert found.transfer.usage is not None
    p, d = found.transfer.usage
    if d.free_blocks != d.total_blocks or d.requests:
        raise Violation(
            Finding(
                rule="KV-FAIL-005",
                happened=f"{_story(transfer)}: {RELEASE_S * bench.settings.timeout_scale:.0f} s later D still holds "
                f"{d.total_blocks - d.free_blocks} of {d.total_blocks} blocks and {len(d.requests)} requests",
                diagnosis="a failed load was not reported in finished_recving by every rank",
            )
        )
    if kept := bench.faults.kept(bench.cell, transfer):
        raise Violation(
            Finding(
                rule="KV-FAIL-005",
                happened=f"{_story(transfer)}: P still holds {len(kept)} of {len(transfer.prompts)} requests, and its lease of "
                f"{bench.faults.lease_s:.0f} s is over",
                diagnosis="P waits for a notification that will not come, without a deadline",
            )
        )
    return Evidence(
        looked_at=d.total_blocks + p.total_blocks, unit="blocks", bytes_moved=moved(found.transfer)
    )


@case("KV-FAIL-006", variants=_with_traces)
def next_transfer_is_right(bench: Bench, transfer: Transfer) -> Evidence:
    """Another prompt is handed over on the same engines without faults, and every byte is right."""
    after = _completed(bench, transfer).after
    assert after is not None
    unfinished = after.failed.sentence if after.failed else "; ".join(after.stuck) or after.refused
    if unfinished or not sum(check.rows_due for r in after.requests for check in r.checks):
        raise Violation(
            Finding(
                rule="KV-FAIL-006",
                happened=f"after this: {_story(transfer)}: the next request of D "
                + (f"did not end well: {unfinished}" if unfinished else "was given nothing"),
                log=after.failed.log if after.failed else after.logged,
            )
        )
    for check in [*_others(after), *after.audits[0]]:
        if not check.pool.words.get(COLLATERAL) and (check.request or not check.pool.wrong):
            continue
        raise Violation(
            Finding(
                rule="KV-FAIL-006",
                happened=f"after this: {_story(transfer)}: the next transfer changed what was not due",
                differs=count_pool(check.pool),
                picture=draw_pool(check.pool),
                diagnosis=diagnose_pool(check.pool),
            )
        )
    return _bytes_right(bench, after, "KV-FAIL-006")


def _with_faults(bench: Bench, transfer: Transfer) -> FaultObservation:
    """The observation. Raises NotApplicable where nothing can be disturbed, Blocked where the fault met nothing."""
    if is_store(bench):
        raise NotApplicable(NEEDS_NIXL)
    if not bench.faults.agents(bench.cell, transfer.policy):
        if bench.subject.module is None and bench.subject.connector.startswith("Nixl"):
            raise HarnessError("vLLM's own NIXL connector made no agent that this suite can control")
        raise NotApplicable(NEEDS_NIXL)
    found = bench.faults.observe(bench.cell, transfer)
    struck = found.reports[0] + found.reports[1]
    done = not (found.transfer.failed or found.transfer.stuck)
    if done and any(f.hold or f.late or f.fail for f in transfer.faults) and not struck.changed:
        raise Blocked(
            f"{_story(transfer)}: the connector began no transfer that this fault is for ({struck.transfers} in all)"
        )
    if done and any(f.notifications for f in transfer.faults) and not struck.notifications:
        raise Blocked(f"{_story(transfer)}: no notification came, so none could be disturbed")
    return found


def _completed(bench: Bench, transfer: Transfer) -> FaultObservation:
    """The observation, if every request came to its end."""
    found = _with_faults(bench, transfer)
    if found.transfer.failed or found.transfer.stuck:
        raise Blocked(f"stands on kv::bytes/transport_faults::every_request_ends[{bench.cell}-{transfer}]")
    return found


def _failed_requests(observed: TransferObservation) -> list[Received]:
    """Requests that ended with an error, or that D computed itself after it had been promised KV."""
    return [
        r
        for r in observed.requests
        if r.finish == "error"
        or (r.decode.external_tokens and r.decode.first_computed <= r.decode.local_tokens)
    ]


def _bytes_right(bench: Bench, observed: TransferObservation, rule: str) -> Evidence:
    """Evidence of the requests that were given KV. Raises Violation if a row is wrong."""
    for r in observed.requests:
        for check in r.checks:
            if wrong_words(check, "attention"):
                raise Violation(finding(bench, observed, r, check, rule))
    due = sum(check.rows_due for r in observed.requests for check in r.checks)
    if not due:
        raise Blocked(
            f"stands on kv::bytes/transport_faults::every_request_ends[{bench.cell}-{observed.transfer}]: D was given nothing"
        )
    return Evidence(
        looked_at=due, unit="rows", bytes_moved=moved(observed), notes={"seconds": round(observed.seconds, 3)}
    )


def _others(observed: TransferObservation) -> list[Check]:
    """Every look at D's pools: what was found once is not reported again, so a late write may show in the check of another request."""
    return [check for r in observed.requests for check in r.checks] + list(observed.audits[1])


def _unnoticed(bench: Bench, transfer: Transfer, observed: TransferObservation) -> Finding | None:
    """A transfer failed, and D went on as if it had not. None: the bytes are there, since the connector has tried again."""
    cause = "a transfer that failed is reported as if it had been made"
    for r in observed.requests:
        for check in r.checks:
            if wrong_words(check, "attention"):
                wrong = finding(bench, observed, r, check, "KV-FAIL-001")
                return Finding(
                    rule=wrong.rule,
                    happened=f"{_story(transfer)}, and {wrong.happened}",
                    differs=wrong.differs,
                    picture=wrong.picture,
                    diagnosis=f"{cause}: {wrong.diagnosis}",
                    signature=cause,
                )
    return None


def _story(transfer: Transfer) -> str:
    """What the transport did, in words: "on rank 1 transfer 0 failed"."""
    told: list[str] = []
    for f in transfer.faults:
        where = f"on rank {', '.join(map(str, f.ranks))} " if f.ranks else ""
        every = "every other transfer" if told else "every transfer"
        which = f"transfer {', '.join(map(str, f.transfers))}" if f.transfers else every
        if f.fail:
            how = {
                STATUS: "ended in the state ERR",
                POST: "could not be begun (transfer() raised)",
                POLL: "failed (check_xfer_state() raised)",
            }
            told.append(
                f"{where}{which} {how[f.fail]}"
                + (" and could not be cancelled for a while" if f.linger else "")
            )
        elif f.hold or f.late:
            told.append(
                f"{where}{which} {'was begun' if f.hold else 'was said to be complete'} {f.hold or f.late} rounds late"
            )
        if f.notifications:
            told.append(
                {
                    TWICE: "every notification came twice",
                    LATE: "notifications came late",
                    NEVER: "no notification came",
                }.get(f.notifications, "notifications came in another order")
            )
    return " and ".join(told)
