"""Connectors with one mistake each: P and D compare what `hash` says of a text. Each Python salts it anew."""

from __future__ import annotations

from typing import Any

from tests.right_connectors.sockets import TcpPull
from tests.right_connectors.stores import WholeBlocks


class HashesModel(TcpPull):
    """D loads from a P whose model has the same `hash`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.model = hash(self.model)


class HashesKeys(WholeBlocks):
    """Keys of blocks begin with a `hash`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.prefix = str(hash(self.prefix))
