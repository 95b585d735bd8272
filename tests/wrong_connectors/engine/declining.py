"""Connectors for one rank only, and what each does with two ranks. Only engines import this module."""

from __future__ import annotations

import os
from typing import Any

from . import MovesNothing, Right


class Declines(Right):
    """Says so, and does not start."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            raise ValueError("this connector is for tensor parallel size 1")
        super().__init__(vllm_config, role, kv_cache_config)


class GivesUp(Right):
    """Starts, and gives every load up."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens and self._vllm_config.parallel_config.tensor_parallel_size > 1:
            request.kv_transfer_params["remote_engine_id"] = "nobody"
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class Dies(Right):
    """Says nothing, and takes the engine along."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            os.abort()
        super().__init__(vllm_config, role, kv_cache_config)


class Corrupts(MovesNothing):
    """Starts, and delivers nothing of what it announces."""


class Works(Right):
    """Does what it says that it does not."""
