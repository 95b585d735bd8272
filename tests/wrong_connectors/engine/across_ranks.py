"""Mistakes between engines of unequal sizes that NixlConnector refuses, in the reference connector."""

from __future__ import annotations

from typing import Any

from reference_connector import connector

__all__ = ["DraftLateAcrossRanks"]


class DraftLateAcrossRanks(connector.ReferenceConnector):
    """The last block of the draft model's KV is the one before it."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        *_, last = self._kv_cache_config.kv_cache_groups[0].layer_names
        self.draft = self._vllm_config.compilation_config.static_forward_context[last].kv_cache
        self.blocks = dict[str, list[int]]()
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if isinstance(metadata := self._get_connector_metadata(), connector.Metadata):
            self.blocks |= {name: load.groups[0].blocks for name, load in metadata.orders.loads.items()}
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request in results.finished_recving:
            *_, before, last = self.blocks.pop(request)
            self.draft[last] = self.draft[before]
        return results
