"""A second connector for vLLM's MultiConnector, beside the subject. It moves nothing.

vLLM imports this module where `kv_config.inside_multi_connector` names it. A case sets the attributes of the
scheduler half, which tells the worker half.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

LOADED, FAILED, INVALID = "loaded", "failed", "invalid"  # how a load ends: see `FakeConnector.ends`


class FakeError(Exception):
    """What the fake connector raises in shutdown() if it is told to."""


@dataclass
class FakeMetadata(KVConnectorMetadata):
    """What the worker half reports in this step: request -> its blocks, and how the loads end."""

    loads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ends: str = LOADED


class FakeConnector(KVConnectorBase_V1, SupportsHMA):
    """The fake connector. A case sets its attributes.

    `loads`: whether it announces all but the last token of the next request, to load between steps.
    `none_answers`: how often it answers None before. `ends`: how its worker half reports such a load: LOADED,
    FAILED (by the request) or INVALID (by the blocks). `keeps`: whether it keeps the blocks of every request
    that ends. `params`: the kv_transfer_params that it returns then. `raises`: whether shutdown() raises.
    """

    loads, none_answers, keeps, ends, raises = False, 0, False, LOADED, False
    params: dict[str, Any] | None = None
    shutdowns = 0  # calls of shutdown() so far

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._ordered: dict[str, tuple[int, ...]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.none_answers:
            self.none_answers -= 1
            return None, False
        missing = request.num_tokens - 1 - num_computed_tokens if self.loads else 0
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load, and announce no further one: each load is announced once."""
        if num_external_tokens:
            self.loads = False
            new = (block.block_id for group in blocks.blocks for block in group if block.block_hash is None)
            self._ordered[request.request_id] = tuple(new)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        ordered, self._ordered = self._ordered, {}
        return FakeMetadata(ordered, self.ends)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.keeps, None if self.params is None else dict(self.params)

    request_finished_all_groups = request_finished

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        metadata = self._get_connector_metadata()
        return KVConnectorTransferResults(
            finished_recving=set(metadata.loads),
            failed_recving=set(metadata.loads) if metadata.ends == FAILED else set(),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        metadata = self._get_connector_metadata()
        invalid = metadata.loads.values() if metadata.ends == INVALID else ()
        return {block for blocks in invalid for block in blocks}

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return FakeStats({"steps": 1})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return FakeStats(data or {"steps": 0})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics | None:
        return FakeMetrics(*args)

    def shutdown(self) -> None:
        self.shutdowns += 1
        if self.raises:
            raise FakeError("the fake connector raises in shutdown()")


class FakeStats(KVConnectorStats):
    """`data`: {"steps": steps of both halves}."""

    def reset(self) -> None:
        self.data = {"steps": 0}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return FakeStats({"steps": self.data["steps"] + other.data["steps"]})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data["steps"]


class FakeMetrics(KVConnectorPromMetrics):
    """One counter for each engine."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        steps = self._counter_cls("vllm:kvconform_fake_steps", "Steps", labelnames=self._labelnames)
        engines = self.per_engine_labelvalues.items()
        self._steps = {engine: steps.labels(*values) for engine, values in engines}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._steps[engine_idx].inc(transfer_stats_data["steps"])


with contextlib.suppress(ValueError):  # MultiConnector looks it up by its name alone: docs/findings.md
    KVConnectorFactory.register_connector("FakeConnector", __name__, "FakeConnector")
