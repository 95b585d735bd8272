"""Each transfer of a load in turn, on each rank, is slow or fails: not only the first one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from msgspec.structs import replace

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Cell, Evidence, blocked_by
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.scenario import POLL, POST, STATUS, Faults, Transfer
from pytest_kvconform.suite.bytes._fault_observations import (
    all_checks,
    bytes_right,
    check_reported_in_time,
    completed,
    observe,
    require_faults,
    without_faults,
)
from pytest_kvconform.suite.bytes._fault_transfers import PROMPTS, SLOW, policy_of
from pytest_kvconform.suite.bytes._observations import moved
from pytest_kvconform.suite.bytes._transfers import has_state
from pytest_kvconform.suite.bytes.transport_faults import (
    every_request_ends,
    next_transfer_is_right,
    nothing_is_written_after_a_failed_load,
)


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a transfer fails, and what vLLM does then."""

    name: str
    policy: str  # kv_load_failure_policy
    fails: bool = True

    def __str__(self) -> str:
        return self.name


# transfer() raises; the state is bad at once, or after some time; the question for the state raises
MOMENTS = {
    "begin": Faults(fail=POST),
    "first_look": Faults(fail=STATUS),
    "later": Faults(fail=STATUS, hold=SLOW // 2),
    "raises": Faults(fail=POLL, hold=2),
}
IN_QUICK = ("later",)
MOST = 8  # transfers that are tried, evenly spread over those of a load
# Transfers in a quick run. Two, since the last one may belong to no load: a connector may read once more when
# it has released P's blocks.
IN_QUICK_RUN = 2


def cells(cell: Cell, matrix: str) -> tuple[None, ...]:
    return (None,) if policy_of(cell, matrix) else ()


def moments(cell: Cell, matrix: str) -> list[Moment]:
    policy = policy_of(cell, matrix)
    if not policy or (matrix == "quick" and cell.topology != "P2D1" and not has_state(cell)):
        return []
    return [Moment(name, policy) for name in (IN_QUICK if matrix == "quick" else MOMENTS)]


@case("KV-FAIL-007", variants=cells)
def load_ends_with_its_last_transfer(bench: Bench, variant: None) -> Evidence:
    """A load is reported as finished when each of its transfers has ended, whichever is the last."""
    looked_at = size = 0
    for transfer in _one_by_one(bench, "late", Faults(hold=SLOW)):
        every_request_ends(bench, transfer)
        check_reported_in_time(bench, found := completed(bench, transfer))
        _require_right_without_faults(bench, transfer)
        bytes_right(bench, found.transfer, "KV-BYTES-001")
        looked_at, size = looked_at + 1, size + moved(found.transfer)
    return _evidence(looked_at, size)


@case("KV-FAIL-001", variants=moments)
def each_transfer_may_fail(bench: Bench, moment: Moment) -> Evidence:
    """Whichever transfer of a load fails: its request ends, and the next load is right."""
    looked_at = size = 0
    for transfer in _one_by_one(bench, moment.name, MOMENTS[moment.name]):
        _require_right_without_faults(bench, transfer)
        every_request_ends(bench, transfer)
        nothing_is_written_after_a_failed_load(bench, transfer)
        next_transfer_is_right(bench, transfer)
        after = completed(bench, transfer).after
        assert after is not None
        looked_at, size = looked_at + 1, size + moved(after)
    return _evidence(looked_at, size)


def _require_right_without_faults(bench: Bench, transfer: Transfer) -> None:
    """Raise Blocked if D's pool is wrong after the same transfer without faults.

    Faults are not the cause then, and cases about transfers without faults report it.
    """
    found = without_faults(bench, transfer).transfer
    if any(check.pool.wrong for check in [*all_checks(found), *found.audits[0]]):
        case = f"kv::bytes/pool::attention_kv_arrives[{bench.cell}]"
        raise blocked_by(case, "pools are wrong without faults, too")


def _evidence(looked_at: int, size: int) -> Evidence:
    if not looked_at:
        raise Blocked("the connector begins other transfers each time, and none of them could be changed")
    return Evidence(looked_at=looked_at, unit="transfers", bytes_moved=size)


def _one_by_one(bench: Bench, name: str, faults: Faults) -> Iterator[Transfer]:
    """Yield a transfer of one prompt for each transfer of a load: on each rank in turn, this one alone has
    these faults. In a quick run only those of the first rank, and without states only the last IN_QUICK_RUN
    that a fault can change.
    """
    cell = bench.cell
    policy = policy_of(cell, bench.settings.matrix)
    whole = Transfer(name, PROMPTS[1:], faults=(faults,), fails=bool(faults.fail), policy=policy)
    require_faults(bench, whole)
    of_p, of_d = without_faults(bench, whole).begun
    ranks = range(max(len(of_p), len(of_d)))
    begun = [max(0, *of_p[rank : rank + 1], *of_d[rank : rank + 1]) for rank in ranks]
    found = [(rank, number) for rank in ranks for number in range(begun[rank])]
    if not found:
        raise Blocked("the connector began no transfer for a load without faults")
    left = len(found)
    if bench.settings.matrix == "quick":
        found = [pair for pair in found if pair[0] == found[0][0]]
        if not has_state(cell):
            found, left = found[-MOST:], IN_QUICK_RUN
    every = -(-len(found) // MOST)
    for rank, number in found[::-1][::every]:
        if not left:
            return
        one = replace(faults, ranks=(rank,), transfers=(number,))
        transfer = dataclasses.replace(whole, name=f"{name}_{rank}_{number}", faults=(one,))
        seen, _ = observe(bench, transfer)
        if seen.transfer.failed or seen.transfer.stuck or any(report.changed for report in seen.reports):
            left -= 1
            yield transfer
