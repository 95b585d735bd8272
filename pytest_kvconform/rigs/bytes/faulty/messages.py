"""Records of what each rank of a peer engine was asked and reported, and of what its scheduler read.

They are frozen, and travel pickled to the controller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from pytest_kvconform.rigs.engine.messages import Trace

# Moments at which a request is aborted: the ranks have reported its load, and the scheduler does not know it;
# the scheduler knows it; a step has computed the request for the first time.
REPORTED, KNOWN, COMPUTED = MOMENTS = ("reported", "known", "computed")
FAILED = "failed"  # a rank has reported its load in a step in which another worker failed


class RankReport(msgspec.Struct, frozen=True):
    """What the worker half of one rank reported in one step.

    The hooks are get_transfer_results and get_block_ids_with_load_errors.
    """

    step: int
    sending: tuple[str, ...]  # finished_sending
    recving: tuple[str, ...]  # finished_recving
    failed: tuple[str, ...]  # failed_recving
    blocks: tuple[int, ...]  # blocks that failed to load
    idle: bool  # no token was computed in this step


@dataclass(frozen=True)
class RankObservation:
    """One rank since its engine was built."""

    rank: int
    reports: tuple[RankReport, ...]  # of the steps in which the worker half reported anything
    steps: int
    idle_steps: int  # of these, without a token to compute
    load_error_polls: int  # calls of get_block_ids_with_load_errors
    # float64 [call, (start, seconds, others)]; start: of the monotonic clock; seconds: without those in which
    # the thread waited for a core; others: in which another thread of the process waited for one, perhaps
    # while it held a lock that the call needed
    start_load_kv_calls: np.ndarray
    finished_count: int = 0  # how many ranks report each request: get_finished_count, or all ranks

    def reports_of(self, field: str, request: str) -> list[RankReport]:
        """The reports that name a request in `field`: "sending", "recving" or "failed"."""
        return [report for report in self.reports if request in getattr(report, field)]

    def since(self, before: RankObservation) -> RankObservation:
        """What this rank has done since an earlier look at it."""
        return replace(
            self,
            reports=tuple(report for report in self.reports if report.step > before.steps),
            steps=self.steps - before.steps,
            idle_steps=self.idle_steps - before.idle_steps,
            load_error_polls=self.load_error_polls - before.load_error_polls,
            start_load_kv_calls=self.start_load_kv_calls[len(before.start_load_kv_calls) :],
        )

    def longest_start_load_kv(self, first: float, end: float) -> tuple[float, float] | None:
        """Of the calls of start_load_kv that began in [first, end): the seconds of the longest, and the most
        that is left of one without the waits of others. None if there was none.
        """
        calls = self.start_load_kv_calls
        _, seconds, others = calls[(calls[:, 0] >= first) & (calls[:, 0] < end)].T
        return (max(seconds.tolist()), max((seconds - others).tolist())) if len(seconds) else None


class Reading(msgspec.Struct, frozen=True):
    """What vLLM's scheduler read in the report of one step, which update_connector_output may have changed
    (v1/core/sched/scheduler.py: _update_from_kv_xfer_finished). `taken`: what it has taken out.
    """

    sending: tuple[str, ...]  # finished_sending
    recving: tuple[str, ...]  # finished_recving
    taken_sending: tuple[str, ...]
    taken_recving: tuple[str, ...]


@dataclass(frozen=True)
class EngineObservation:
    """What an engine did in all its scenarios together."""

    ranks: tuple[RankObservation, ...]
    traces: dict[str, Trace]  # request -> its trace
    readings: tuple[Reading, ...]

    def times_read(self, where: str, request: str) -> int:
        """In how many reports of its workers vLLM's scheduler has read a request.

        `where`: "sending" or "recving".
        """
        return sum(request in getattr(one, where) for one in self.readings)

    def times_taken(self, where: str, request: str) -> int:
        """Out of how many reports update_connector_output has taken a request that was in them."""
        return self.times_read(f"taken_{where}", request)


class LoadReport(msgspec.Struct, frozen=True):
    """How far the transfers of one rank were when its worker half reported a load as finished, or when the
    scheduler half did.
    """

    rank: int
    request: str
    begun: int  # transfers that the connector had begun
    ended: int  # of these, those that had ended, and of which the connector had been told so


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the faults did on one rank."""

    agents: int = 0  # agents that the connector has made; 0: it does not use NIXL
    hooks: int = 0  # worker halves that have `kvconform_fault`, see rank_faults.py
    transfers: int = 0  # transfers begun since `set_faults`
    changed: int = 0  # of these, held, delayed or failed
    failed: int = 0  # of these, failed
    notifications: int = 0  # notifications that the faults changed
    # Transfers not begun yet, failed ones that may still write, notifications that are not due yet.
    pending: int = 0
    loads: tuple[LoadReport, ...] = ()  # reported as finished since `set_faults`

    def __add__(self, other: FaultReport) -> FaultReport:
        return FaultReport(
            **{name: getattr(self, name) + getattr(other, name) for name in FaultReport.__struct_fields__}
        )
