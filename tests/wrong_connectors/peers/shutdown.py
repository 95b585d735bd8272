"""Wrong ends of a D that loads from a P which does not answer."""

from __future__ import annotations

import socket
import threading
from typing import Any

from msgspec.structs import replace
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import reference_connector.worker
import tests.right_connectors.sockets
from reference_connector import ReferenceConnector
from tests.right_connectors.sockets import TcpPull, ask, connect, receive

__all__ = [
    "AsksFirst",
    "EndsWithItsReads",
    "KeepsAgent",
    "KeepsHandles",
    "KeepsIdleAgent",
    "LeavesThreads",
    "RaisesDuringLoads",
]

HERE = b"here"


class LeavesThreads(TcpPull):
    """Lets its threads end when they have read what they read. They are daemons."""

    def start_worker(self, serves: bool) -> None:
        tests.right_connectors.sockets.PATIENCE_S = 60.0  # P stands still for longer on a busy machine
        super().start_worker(serves)

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER and self.server is None:
            for _ in self.threads:
                self.jobs.put(None)
        else:
            super().shutdown()


class EndsWithItsReads(ReferenceConnector):
    """Shuts down when the last read has ended."""

    def shutdown(self) -> None:
        reference_connector.worker.CLOSING_S = float("inf")
        super().shutdown()


kept: list[Any] = []


class KeepsIdleAgent(ReferenceConnector):
    """No mistake: its agent of NIXL outlives it. Nothing calls that agent, and it has no progress thread."""

    thread = False

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._options = replace(self._options, progress_thread=self.thread)
        super().register_kv_caches(kv_caches)
        kept.append(self._worker._transport._agent)


class KeepsAgent(KeepsIdleAgent):
    """Its agent of NIXL outlives it, and has a progress thread."""

    thread = True


class KeepsHandles(ReferenceConnector):
    """Remembers the handles of its reads. They keep NIXL's agent, which has a progress thread."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._options = replace(self._options, progress_thread=True)
        super().register_kv_caches(kv_caches)
        transport = self._worker._transport
        begin = transport.begin

        def begin_and_keep(handle: Any) -> None:
            kept.append(handle)
            begin(handle)

        transport.begin = begin_and_keep


class RaisesDuringLoads(TcpPull):
    """Ends its loads, and then raises an exception."""

    def shutdown(self) -> None:
        loads = self.role is KVConnectorRole.WORKER and len(self.connected) > 0
        super().shutdown()
        if loads:
            raise RuntimeError("a load is under way")


class AsksFirst(TcpPull):
    """No mistake: D answers None until P has said that it is there."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.there = set[str]()  # requests of D whose P has answered

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if (params := self.wanted.get(request.request_id)) is not None:
            threading.Thread(target=self.look, args=(request.request_id, params), daemon=True).start()

    def look(self, request: str, params: dict[str, Any]) -> None:
        try:
            with connect(params) as peer:
                ask(peer, there=True)
                receive(peer, len(HERE))
            self.there.add(request)
        except (OSError, EOFError):
            self.wanted.pop(request, None)  # D computes the prompt

    def answer(self, peer: socket.socket, question: dict[str, Any]) -> None:
        if "there" in question:
            peer.sendall(HERE)
        else:
            super().answer(peer, question)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id in self.wanted.keys() - self.there:
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)
