"""Records of a side's steps: what its workers report, and what a step did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pytest_kvconform.rigs.scheduler.leaks import integers, mentions


@dataclass(frozen=True)
class WorkerReport:
    """What one rank reports at the end of a step: request ids, and in `invalid` block ids.

    `invalid` is for models of one KV cache group.
    """

    sent: Iterable[str] = ()
    received: Iterable[str] = ()
    failed: Iterable[str] = ()  # of the received ones
    invalid: Iterable[int] = ()


@dataclass(frozen=True)
class RequestOutput:
    """The output of one request in one step."""

    tokens: tuple[int, ...]
    finish: str | None  # "stop", "length", "abort", "error"; None: the request goes on
    params: dict[str, Any] | None  # kv_transfer_params, as the connector returned them


@dataclass(frozen=True)
class Step:
    """What one step did."""

    number: int  # from 1
    scheduled: dict[str, tuple[int, int]]  # request -> tokens [first, end) that are computed in it
    outputs: dict[str, RequestOutput]
    metadata: Any  # of build_connector_meta, after the way to a worker (pickle)
    has_sync_kv_loads: bool  # of the SchedulerOutput: a synchronous load happens in this step
    finished: frozenset[str]  # finished_req_ids: requests of whose end the workers are notified
    preempted: frozenset[str]  # preempted_req_ids
    metadata_object: Any  # what build_connector_meta returned; the connector may still change it

    def mentions(self, request: str) -> bool:
        """Whether the id of a request stands anywhere in the metadata."""
        return bool(mentions(self.metadata, request))

    def block_ids_for(self, request: str) -> frozenset[int]:
        """Block ids, and other numbers in lists, of metadata that mentions a request.

        They are what the metadata orders for the request's load or save.
        """
        return integers(self.metadata) if self.mentions(request) else frozenset()
