"""Right scheduler halves: vLLM's NixlConnector, and one that answers late. Wrong ones change them."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector

Answer = tuple[int | None, bool]
Ended = tuple[bool, dict[str, Any] | None]


class Right(NixlConnector):
    """No mistake."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.notes: dict[str, Any] = {}  # by request

    @property
    def half(self) -> Any:
        """The scheduler half."""
        return self.connector_scheduler


def loads(request: Any) -> bool:
    """Whether P has handed the request over."""
    return bool((request.kv_transfer_params or {}).get("remote_block_ids"))


def prefills(request: Any) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


class SureLater(Right):
    """No mistake: it does not know at once how much P has."""

    asked = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        self.asked += 1
        return (
            (None, False)
            if self.asked % 3
            else super().get_num_new_matched_tokens(request, num_computed_tokens)
        )
