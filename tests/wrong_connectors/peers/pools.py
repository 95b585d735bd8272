"""A right connector whose P holds blocks in vLLM's pool, without vLLM's knowledge of the request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults

from reference_connector import ReferenceConnector
from reference_connector.connector import WorkerReport

__all__ = ["HoldsInPool"]


@dataclass
class Sent(WorkerReport):
    """Request -> ranks of P that have sent it."""

    ranks: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: Any) -> Sent:
        return Sent(self.notified | other.notified, self.missed | other.missed, self.ranks + other.ranks)


class HoldsInPool(ReferenceConnector):
    """Right: P references blocks in vLLM's pool, as MooncakeStoreConnector, and lets vLLM forget requests."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.ranks = vllm_config.parallel_config.tensor_parallel_size
        self.held: dict[str, list[Any]] = {}
        self.sent, self.reports = Counter[str](), Counter[str]()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        kept, params = super().request_finished_all_groups(request, block_ids)
        if kept:
            self.held[request.request_id] = [self.pool.blocks[n] for ids in block_ids for n in ids if n]
            self.pool.touch(self.held[request.request_id])
        return False, params

    def has_pending_push_work(self) -> bool:
        return bool(self.held) or super().has_pending_push_work()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = super().get_transfer_results(finished_req_ids)
        self.sent.update(found.finished_sending)
        found.finished_sending.clear()
        return found

    def build_connector_worker_meta(self) -> Sent | None:
        found: Any = super().build_connector_worker_meta() or WorkerReport()
        sent, self.sent = Sent(found.notified, found.missed, self.sent), Counter()
        return sent if sent != Sent() else None

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if isinstance(report := connector_output.kv_connector_worker_meta, Sent):
            self.reports += report.ranks
            for request in [one for one, ranks in self.reports.items() if ranks == self.ranks]:
                del self.reports[request]
                self.pool.free_blocks(reversed(self.held.pop(request)))
