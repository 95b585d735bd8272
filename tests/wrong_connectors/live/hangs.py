"""P/D pairs of which one engine hangs: the reference connector, and something that it waits for."""

from __future__ import annotations

import socket
import threading
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from reference_connector import ReferenceConnector


def wait_for_ever() -> None:
    threading.Event().wait()


def is_p(connector: Any) -> bool:
    return bool(connector._kv_transfer_config.kv_role == "kv_producer")


class HangsInAStepOfP(ReferenceConnector):
    """Wrong: a hook of P never ends."""

    def wait_for_save(self) -> None:
        if is_p(self):
            wait_for_ever()
        super().wait_for_save()


class HangsInAStepOfD(ReferenceConnector):
    """Wrong: a hook of D never ends. P may step meanwhile."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        if metadata.orders.loads:
            wait_for_ever()
        super().start_load_kv(forward_context, **kwargs)


class Waits:
    """It waits for ever when it is collected, as a zmq.Context that is not closed."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        wait_for_ever()


class HangsInGarbageOfP(ReferenceConnector):
    """Wrong: P leaves something unclosed, which hangs when Python collects it, in no hook."""

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if is_p(self):
            Waits()


class HangsInTheStartOfP(ReferenceConnector):
    """Wrong: the start of P never ends."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if is_p(self):
            wait_for_ever()


class NeedsAServer(ReferenceConnector):
    """Right: the start of P waits for the first message of its server, which is not there."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if is_p(self):
            with socket.create_server(("127.0.0.1", 0)) as server:
                server.accept()
