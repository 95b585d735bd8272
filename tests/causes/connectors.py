"""Connectors over TCP with one mistake each in when, or from where, P takes what it sends."""

from __future__ import annotations

import socket
from typing import Any

import torch

from tests.right_connectors.sockets import Orders, TcpPull


class Right(TcpPull):
    """No mistake."""


class SendsWhatWasThere(TcpPull):
    """P sends what its blocks held before the step that computed the prompt: its copy does not wait for the
    forward.
    """

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self.before = [cache.clone() for cache in self.caches]
        self.kept: dict[str, list[torch.Tensor]] = {}

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        for request in connector_metadata.sends:  # the step before has computed it
            self.kept[request] = self.before
        self.before = [cache.clone() for cache in self.caches]

    def send(self, peer: socket.socket, request: str, layer: int, blocks: list[int]) -> None:
        peer.sendall(self.kept[request][layer][blocks].contiguous().view(torch.uint8).numpy().tobytes())


class KeepsNothing(TcpPull):
    """P gives its blocks back when it has computed them, and sends them later."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, super().request_finished_all_groups(request, block_ids)[1]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_sending.clear()
        return results


class SendsTheLast(TcpPull):
    """P sends the blocks of the request that it has computed last, whichever is asked for."""

    last: list[int] | None = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        for self.last in orders.sends.values():
            pass

    def send(self, peer: socket.socket, request: str, layer: int, blocks: list[int]) -> None:
        super().send(peer, request, layer, (self.last or blocks)[-len(blocks) :])


class WritesNothing(TcpPull):
    """D reads nothing, and reports the load as finished."""

    def read(self, load: Any, layers: range) -> bool:
        return True
