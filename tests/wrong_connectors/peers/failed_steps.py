"""Connectors that expect the reports of one step at a time. vLLM 0.33 gives two after a failed step."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from reference_connector import ReferenceConnector

from .right import Right


class Reference(ReferenceConnector):
    """Right: each of its reports may come with another one of the same rank."""


@dataclass
class OfRanks(KVConnectorWorkerMetadata):
    ranks: frozenset[int]

    def aggregate(self, other: Any) -> KVConnectorWorkerMetadata:
        assert not self.ranks & other.ranks, f"rank {min(self.ranks & other.ranks)} has reported twice"
        return OfRanks(self.ranks | other.ranks)


class CountsRanks(Right):
    """Expects the worker metadata of each rank once."""

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return OfRanks(frozenset({self.connector_worker.tp_rank}))


class ByRank(KVConnectorStats):
    """`data`: rank -> steps."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        assert not self.data.keys() & other.data.keys(), "statistics of a rank came twice"
        return ByRank(self.data | other.data)

    def reset(self) -> None:
        self.data = {}

    def reduce(self) -> dict[str, int | float]:
        return {"Ranks": len(self.data)}

    def is_empty(self) -> bool:
        return not self.data


class CountsStatistics(Right):
    """Expects the statistics of each rank once."""

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        worker = self.connector_worker  # None in the scheduler half
        return ByRank({str(worker.tp_rank): 1}) if worker else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return ByRank(data or {})


# ---- vLLM 0.33's aggregator, in an older one ----


def ft_defer_kv_connector_outputs(self: Any, kv_connector_outputs: list[Any]) -> None:
    for one in kv_connector_outputs:
        one.kv_cache_events = None
    self.salvaged = [SimpleNamespace(kv_connector_output=one) for one in kv_connector_outputs]


if not hasattr(KVOutputAggregator, "ft_defer_kv_connector_outputs"):
    _aggregate = KVOutputAggregator.aggregate

    def aggregate(self: Any, outputs: list[Any], output_rank: int = 0) -> Any:
        if not outputs[output_rank]:
            return None
        salvaged = self.__dict__.pop("salvaged", [])
        return _aggregate(self, [*salvaged, *outputs], len(salvaged) + output_rank)

    KVOutputAggregator.aggregate = aggregate
    KVOutputAggregator.ft_defer_kv_connector_outputs = ft_defer_kv_connector_outputs
