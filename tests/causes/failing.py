"""Connectors that fail in ways from which the suite decides what happens to other cases."""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from reference_connector import ReferenceConnector


class DeclinesTwoRanks(ReferenceConnector):
    """It does not start with two ranks, and says why."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            raise ValueError("one rank only")
        super().__init__(vllm_config, role, kv_cache_config)


class DiesWithTwoRanks(ReferenceConnector):
    """It ends its process where it has two ranks."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            os._exit(7)
        super().__init__(vllm_config, role, kv_cache_config)


class NeedsAPackage(ReferenceConnector):
    """It imports a package that is not installed."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        import no_such_package  # noqa: F401


class ForgetsLoads(ReferenceConnector):
    """Its workers do not report a load as finished."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, _ = super().get_finished(finished_req_ids)
        return sent, None


class RaisesWhenItEnds(ReferenceConnector):
    """P's scheduler half raises when a request ends."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        raise RuntimeError("no")


class WithoutHma(ExampleConnector):
    """A store without SupportsHMA, with which vLLM starts no model with states."""
