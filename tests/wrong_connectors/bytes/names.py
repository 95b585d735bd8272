"""Connectors with one mistake each in names: those that P and D compare, or those that must differ."""

from __future__ import annotations

import random
import uuid
from types import SimpleNamespace
from typing import Any

import reference_connector.transport
from reference_connector import ReferenceConnector
from tests.right_connectors.sockets import TcpPull
from tests.right_connectors.stores import WholeBlocks


class HashesModel(TcpPull):
    """D loads from a P whose model has the same `hash`. Each interpreter salts it anew."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.model = hash(self.model)


class HashesKeys(WholeBlocks):
    """Keys of blocks begin with a `hash`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.prefix = str(hash(self.prefix))


class DrawsNames(ReferenceConnector):
    """Draws the name of its NIXL agent. vLLM's workers seed random numbers, so P and D have one name."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        drawn = SimpleNamespace(uuid4=lambda: uuid.UUID(int=random.getrandbits(128)))
        reference_connector.transport.uuid = drawn
        super().register_kv_caches(kv_caches)
