"""Connectors whose threads do not end within shutdown(), and do not become more with every engine either."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from reference_connector import ReferenceConnector

POLL_S = 0.01


class EndsWhenCollected(ReferenceConnector):
    """Has a thread that ends when Python collects the connector, as pools of threads and of sockets do."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        threading.Thread(target=_poll, args=(weakref.ref(self),), name="poller", daemon=True).start()


def _poll(connector: Any) -> None:
    while connector() is not None:
        time.sleep(POLL_S)


class OneContext(ReferenceConnector):
    """Uses the one ZeroMQ context of the process, whose threads stay when the sockets are closed."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.socket = zmq.Context.instance().socket(zmq.PULL)

    def shutdown(self) -> None:
        self.socket.close(linger=0)
        super().shutdown()


class OneContextAndAThread(OneContext):
    """Wrong: besides, each half leaves a thread of its own."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        threading.Thread(target=threading.Event().wait, name="poller", daemon=True).start()
