"""Right connectors in which D hands over to P: the KV of a turn, for the next turn of the conversation."""

from __future__ import annotations

import socket
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import RequestStatus

from tests.right_connectors.sockets import TcpPull, serve

ENDED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class KeepsForTheNextTurn(TcpPull):
    """D keeps its blocks when a request has ended, under a lease of their own, and serves them as P does. P
    asks D for them over a connection, as D asks P: P loads first blocks, whatever it has itself.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.turn_s = float(extra.get("turn_s", 480))
        super().__init__(vllm_config, role, kv_cache_config)

    # ---- scheduler half --------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and params.get("remote_model") == self.model:
            self.wanted[request.request_id] = params

    def end_of_load(self, request: Any, params: dict[str, Any]) -> int:
        """The peer may have fewer tokens, or more."""
        whole = super().end_of_load(request, params)
        return min(whole, params.get("remote_num_tokens", whole))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        unread = request.request_id in self.wanted
        keeps, returned = super().request_finished_all_groups(request, block_ids)
        decodes = params.get("do_remote_prefill") and params.get("remote_model") == self.model
        if keeps or unread or not decodes or request.status not in ENDED:
            return keeps, returned
        return self.keep(request, list(block_ids[0]))

    def keep(self, request: Any, blocks: list[int]) -> tuple[bool, dict[str, Any]]:
        """Keep what D has of a request, and return how P finds it."""
        blocks = blocks[: -(-request.num_computed_tokens // self.block_size)]
        self.orders.sends[request.request_id] = blocks
        return True, {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": blocks,
            "remote_num_tokens": request.num_computed_tokens,
            "remote_request_id": request.request_id,
            "remote_model": self.model,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
        }

    # ---- worker half -----------------------------------------------------------------------------------

    def start_worker(self, serves: bool) -> None:
        super().start_worker(False)  # both engines load
        self.server = serve(self)
        if not serves:
            self.lease_s = self.turn_s

    def may_read(self, asked: list[int], blocks: list[int]) -> bool:
        """Whether blocks of a request follow one another: P may want fewer tokens than D has."""
        first = blocks.index(asked[0]) if asked[0] in blocks else 0
        return asked == blocks[first : first + len(asked)]

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER and self.server:
            self.server.shutdown()
            self.server.server_close()
            self.server = None
        super().shutdown()


class CopiesForTheNextTurn(KeepsForTheNextTurn):
    """D copies its blocks to host memory when a request has ended, in its next step and before that step
    writes, and frees them at once. P reads the copy, which goes after a time or when it was read.
    """

    def keep(self, request: Any, blocks: list[int]) -> tuple[bool, dict[str, Any]]:
        return False, super().keep(request, blocks)[1]

    def start_worker(self, serves: bool) -> None:
        super().start_worker(serves)
        self.serves_blocks = serves
        self.copies: dict[str, list[torch.Tensor]] = {}  # request -> its blocks, layer by layer

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """vLLM calls this before a step gives blocks to others."""
        if not self.serves_blocks:
            for request, blocks in kv_connector_metadata.sends.items():
                self.copies[request] = [cache[blocks].clone() for cache in self.caches]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        found = super().get_transfer_results(finished_req_ids)
        if not self.serves_blocks:
            for request in found.finished_sending:
                self.copies.pop(request, None)
            found.finished_sending.clear()  # the blocks are free already
        return found

    def send(self, peer: socket.socket, request: str, layer: int, blocks: list[int]) -> None:
        if self.serves_blocks:
            super().send(peer, request, layer, blocks)
            return
        held, _ = self.leases[request]
        rows = self.copies[request][layer][[held.index(block) for block in blocks]].contiguous()
        peer.sendall(rows.view(torch.uint8).numpy().tobytes())
