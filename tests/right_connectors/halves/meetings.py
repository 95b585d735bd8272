"""A D that waits until its workers have met P, and whose scheduler half ends the loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from ..workers import MeetsFirst, MetReport


@dataclass
class Loaded(MetReport):
    received: set[str] = field(default_factory=set)  # loads that have ended

    def aggregate(self, other: Any) -> Any:
        raise NotImplementedError("there is one rank")


class MeetsAndReports(MeetsFirst):
    """As `MeetsFirst`. Its worker tells the ends of loads in metadata of its own, too, and the scheduler half
    puts them into the report, for one rank.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            raise ValueError("MeetsAndReports has one rank")
        self.received: set[str] = set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = super().get_transfer_results(finished_req_ids)
        self.received |= found.finished_recving
        found.finished_recving = set()
        return found

    def build_connector_worker_meta(self) -> Any:
        report = super().build_connector_worker_meta()
        received, self.received = self.received, set()
        if not received:
            return report
        report = report or MetReport()
        return Loaded(report.notified, report.missed, report.met, received)

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(report := connector_output.kv_connector_worker_meta, Loaded):
            connector_output.finished_recving = {*(connector_output.finished_recving or ()), *report.received}
        super().update_connector_output(connector_output)
