"""Right connectors that look at what vLLM tells of its pool: its size, and who gets a block next."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from reference_connector import ReferenceConnector

from .sockets import Orders, TcpPull


class Right(ReferenceConnector):
    """Nothing but ReferenceConnector."""


class CountsBlocks(ReferenceConnector):
    """Takes the size of the pool from the configuration when the caches are registered, as vLLM's
    MooncakeStoreConnector.
    """

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = self._vllm_config.cache_config.num_gpu_blocks
        assert blocks is not None
        assert all(len(cache) % blocks == 0 for cache in kv_caches.values())
        super().register_kv_caches(kv_caches)


@dataclass
class Savings(Orders):
    """Blocks that this step gives to other requests."""

    taken: frozenset[int] = field(default_factory=frozenset)


class SavesBeforeReuse(TcpPull):
    """P frees its blocks at once, and copies them to host memory in the step that gives them to another
    request, as vLLM's SimpleCPUOffloadConnector does in lazy mode.
    """

    def start_worker(self, serves: bool) -> None:
        self.saved: dict[str, list[bytes]] = {}
        self.lock = threading.Lock()
        super().start_worker(serves)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        _, params = super().request_finished_all_groups(request, block_ids)
        return False, params

    def build_connector_meta(self, scheduler_output: Any) -> Savings:
        orders = super().build_connector_meta(scheduler_output)
        taken = {
            block for one in scheduler_output.scheduled_new_reqs for ids in one.block_ids for block in ids
        }
        return Savings(orders.loads, orders.sends, orders.releases, taken)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Copy what the step is about to overwrite: start_load_kv comes after the forward."""
        orders = kv_connector_metadata
        with self.lock:
            held = {request: blocks for request, (blocks, _) in self.leases.items()} | orders.sends
            for request, blocks in held.items():
                if request not in self.saved and orders.taken & set(blocks):
                    self.saved[request] = [self.rows(layer, blocks) for layer in range(len(self.caches))]

    def rows(self, layer: int, blocks: list[int]) -> bytes:
        return self.caches[layer][blocks].contiguous().view(torch.uint8).numpy().tobytes()

    def rows_of(self, request: str, layer: int, blocks: list[int]) -> bytes:
        """The bytes of these blocks, the last ones of the request, as P has computed them."""
        with self.lock:
            if request not in self.saved:
                return self.rows(layer, blocks)
            whole = self.saved[request][layer]
            return whole[-len(whole) // len(self.leases[request][0]) * len(blocks) :]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        found = super().get_transfer_results(finished_req_ids)
        found.finished_sending.clear()  # vLLM does not wait for them
        return found

    def send(self, peer: socket.socket, request: str, layer: int, blocks: list[int]) -> None:
        peer.sendall(self.rows_of(request, layer, blocks))
