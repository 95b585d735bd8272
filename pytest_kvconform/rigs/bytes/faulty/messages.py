"""Records of what a peer engine did, and of what faults did to its transfers.

They are frozen, and travel pickled to the controller.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pytest_kvconform.rigs.engine.messages import Trace
from pytest_kvconform.rigs.history import History
from pytest_kvconform.rigs.vllm_setup.hooks import UPDATE

# Moments at which a request is aborted: the ranks have reported its load, and the scheduler does not know it;
# the scheduler knows it; a step has computed the request for the first time.
REPORTED, KNOWN, COMPUTED = MOMENTS = ("reported", "known", "computed")
FAILED = "failed"  # a rank has reported its load in a step in which another worker failed


@dataclass(frozen=True)
class EngineObservation:
    """What an engine did in all its scenarios together."""

    ranks: tuple[History, ...]
    traces: dict[str, Trace]  # request -> its trace
    scheduler: History
    finished_count: int  # how many ranks report each request: get_finished_count, or all ranks

    def times_read(self, where: str, request: str) -> int:
        """In how many reports of its workers vLLM's scheduler has read a request.

        `where`: SENDING or RECVING.
        """
        return len(self.scheduler.naming(UPDATE, where, request))

    def times_taken(self, where: str, request: str) -> int:
        """Out of how many reports update_connector_output has taken a request that was in them."""
        reports = self.scheduler.of(UPDATE)
        return sum(request in one.arguments[where] and request not in one.result[where] for one in reports)


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
