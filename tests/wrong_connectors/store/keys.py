"""Stores whose key lacks one thing, or that do not forget; and right ones beside them."""

from __future__ import annotations

import hashlib
import os
import shutil
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from tests.right_connectors.stores import WholeBlocks
from tests.wrong_connectors.store import stores


class Right(stores.Right):
    """Has a folder for each process: what a case has saved is none of another one's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._storage_path += f"/{os.getpid()}"

    def reset_cache(self) -> bool | None:
        shutil.rmtree(self._storage_path)
        return True


class Refuses(Right):
    """No mistake: reset_cache returns that it cannot."""

    def reset_cache(self) -> bool | None:
        return False


class Hashes(Right):
    """No mistake: vLLM's own block hashes are the key, as in MooncakeStoreConnector."""

    def extra(self, request: Any) -> list[str]:
        return [request.block_hashes[self.whole(range(request.num_prompt_tokens)) // 16 - 1].hex()]


class Lacks(Right):
    """The key lacks what begins with a word."""

    word = ""

    def extra(self, request: Any) -> list[str]:
        return [part for part in super().extra(request) if not part.startswith(self.word)]


class LacksSalt(Lacks):
    """The key has no cache_salt."""

    word = "salt"


class LacksAdapter(Lacks):
    """The key has no LoRA adapter."""

    word = "adapter"


class LacksEmbeddings(Lacks):
    """The key has no prompt embeddings: their token ids are zeros."""

    word = "embeddings"


class LacksImages(Right):
    """The key has no images."""

    def extra(self, request: Any) -> list[str]:
        return super().extra(request)[:3]


class LacksPathOfAdapter(Right):
    """An adapter that was trained further is the same to it."""

    def extra(self, request: Any) -> list[str]:
        name = request.lora_request.lora_name if request.lora_request else None
        salt, _, *rest = super().extra(request)
        return [salt, f"adapter {name}", *rest]


class LacksModel(Right):
    """Engines of all models share what is saved."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.engine = "", *self.engine[1:]


class LacksDtype(Right):
    """The dtype "auto" of the configuration is that of all engines."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.engine = self.engine[0], "", self.engine[2]


class SilentAboutMisses(Right):
    """Answers None for ever if it has some prompts, and not this one."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (None, False) if not found[0] and os.path.isdir(self._storage_path) else found


class ForgetsNothing(Right):
    """reset_cache returns True, and every file stays."""

    def reset_cache(self) -> bool | None:
        return True


class InheritsReset(Right):
    """reset_cache is that of the base class, which does nothing and returns None."""

    def reset_cache(self) -> bool | None:
        return KVConnectorBase_V1.reset_cache(self)


class KeysByPlace(WholeBlocks):
    """The key of a block has its own tokens and its place, and none of the tokens before it."""

    def keys(self, request: Any) -> list[str]:
        starts = range(0, len(request.block_hashes) * self.size, self.size)
        blocks = [(start, list(request.all_token_ids[start : start + self.size])) for start in starts]
        return [f"{self.prefix}-{hashlib.sha256(repr(block).encode()).hexdigest()}" for block in blocks]
