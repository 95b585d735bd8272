"""Wrong announcements of stores."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ReqMeta

from tests.wrong_connectors.store import stores


class OwnFolder:
    """What a case has saved is none of another one's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._storage_path += f"/{os.getpid()}"


class Store(OwnFolder, stores.Right):
    """No mistake."""


class Silent(Store):
    """Announces nothing, whatever it has saved."""

    def found(self, request: Any) -> int:
        return 0


class LooksUpOtherTokens(Store):
    """Looks a prompt up under one token less, and loads it under all."""

    def found(self, request: Any) -> int:
        tokens = torch.tensor(request.prompt_token_ids[:-1])
        tokens = tokens[: self.whole(tokens)]
        return len(tokens) if self.saved(tokens, self.extra(request)) else 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.known[request.request_id] = request
        return self.found(request) - num_computed_tokens, False


class AnnouncesTheRest(Store):
    """Takes a prompt whose first block is saved for saved, and loads what it finds."""

    def found(self, request: Any) -> int:
        tokens = self.tokens(request)
        return len(tokens) if self.saved(tokens[: self._block_size], self.extra(request)) else 0

    def read(self, layer: str, request: ReqMeta, layers: list[str]) -> torch.Tensor:
        first = replace(request, token_ids=request.token_ids[: self._block_size])
        found = super().read(layer, first, layers)
        return found.repeat(-(-len(request.token_ids) // len(found)), 1, 1)


class CountsTokens(OwnFolder, stores.CountsTokens):
    """Prompts of one length are the same to it."""


class CountsQuestions(Store):
    """Reserves a block for each question."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.asked = getattr(self, "asked", 0) + 1
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return max(0, found - self._block_size * (self.asked % 2)), is_async
