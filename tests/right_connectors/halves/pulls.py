"""`CarefulPull`: `TcpPull` for connectors that differ in how the bytes come. It checks params before it uses
them, and an engine may have both roles.
"""

from __future__ import annotations

import threading
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ..sockets import TcpPull

BLOCKS = 1 << 31  # far more than a pool has


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


class CarefulPull(TcpPull):
    """Base: P's params have what `TcpPull` relies on, or D computes the prompt."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        if len(kv_cache_config.kv_cache_groups) > 1 or vllm_config.parallel_config.world_size > 1:
            raise ValueError("one KV cache group, and one rank")
        self.reads = vllm_config.kv_transfer_config.is_kv_consumer
        super().__init__(vllm_config, role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        if self.can_use(request.kv_transfer_params, request.num_prompt_tokens):
            super().on_new_request(request)

    def can_use(self, params: Any, tokens: int) -> bool:
        """Whether params of a request name a P and as many of its blocks as the prompt needs."""
        if not isinstance(params, dict):
            return False
        names = ("remote_request_id", "remote_host", "remote_model")
        port, blocks = params.get("remote_port"), params.get("remote_block_ids")
        if (
            type(port) is not int
            or not isinstance(blocks, list)
            or not all(_text(params.get(n)) for n in names)
        ):
            return False
        whole = len(blocks) == -(-tokens // self.block_size)
        return whole and 0 < port < 1 << 16 and all(type(one) is int and 0 < one < BLOCKS for one in blocks)

    def start_worker(self, serves: bool) -> None:
        super().start_worker(serves)
        if serves and self.reads:  # both roles
            self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(4)]
            for thread in self.threads:
                thread.start()

    def shutdown(self) -> None:
        super().shutdown()
        if self.role is KVConnectorRole.WORKER and self.server:
            self.closing = True
            for _ in self.threads:
                self.jobs.put(None)
            for thread in self.threads:
                thread.join()
