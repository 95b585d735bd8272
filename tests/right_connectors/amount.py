"""Connectors that load less than a whole prompt: right ones, and wrong ones beside them.

All are ReferenceConnector but for what the docstring says. How much is loaded is the connector's choice: D
computes the rest. Recurrent states and sliding windows leave no choice: P has the state after its last token
alone, and the KV of the last window alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from reference_connector import ReferenceConnector

CHUNK = 256


def keeps_every_token(kv_cache_config: Any) -> bool:
    """Whether P has the KV of every token when a prompt is computed."""
    ends = MambaSpec, SlidingWindowSpec
    return not any(isinstance(group.kv_cache_spec, ends) for group in kv_cache_config.kv_cache_groups)


class Right(ReferenceConnector):
    """Nothing but ReferenceConnector."""


class StopsElsewhere(ReferenceConnector):
    """D's load ends at another token, if P has the KV of every token."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER and keeps_every_token(kv_cache_config):
            scheduler, size = self._scheduler, vllm_config.cache_config.block_size
            stop: Callable[[Any, int], int] = scheduler._stop
            scheduler._stop = lambda handoff, prompt: self.stop(stop(handoff, prompt), size)

    def stop(self, stop: int, block: int) -> int:
        """Where the load ends, instead of token `stop`."""
        raise NotImplementedError


class OneBlockLess(StopsElsewhere):
    """D loads whole blocks only, and leaves the last whole one to itself, as a store that keeps no block
    which may still be written to.
    """

    def stop(self, stop: int, block: int) -> int:
        return max(0, stop // block * block - block)


class LessOfSome(ReferenceConnector):
    """D leaves the last whole block of some requests to itself."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.less: dict[str, bool] = {}
        self.now = False  # whether the request that is asked about loads less
        if role == KVConnectorRole.SCHEDULER and keeps_every_token(kv_cache_config):
            scheduler, size = self._scheduler, vllm_config.cache_config.block_size
            stop: Callable[[Any, int], int] = scheduler._stop
            scheduler._stop = lambda handoff, prompt: self.cut(stop(handoff, prompt), size)

    def loads_less(self, request: Any) -> bool:
        """Whether the request that is asked about for the first time loads less."""
        raise NotImplementedError

    def cut(self, stop: int, block: int) -> int:
        return max(0, stop // block * block - block) if self.now else stop

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if request.request_id not in self.less:
            self.less[request.request_id] = self.loads_less(request)
        self.now = self.less[request.request_id]
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.now = self.less.get(request.request_id, False)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.less.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


class LessWhenBusy(LessOfSome):
    """D leaves the last whole block to itself if another load is under way when D is first asked, as a
    connector that weighs the time on the wire against that of computing.
    """

    def loads_less(self, request: Any) -> bool:
        return bool(self._scheduler._loading)


class LessNowAndThen(LessOfSome):
    """D leaves the last whole block of every second request to itself, as a connector that tries what is
    faster.
    """

    tries: ClassVar[Iterator[bool]] = itertools.cycle((False, True))

    def loads_less(self, request: Any) -> bool:
        return bool((request.kv_transfer_params or {}).get("do_remote_prefill")) and next(self.tries)


class MoreNowAndThen(LessNowAndThen):
    """D does so with the first one, and with every second one after it."""

    tries: ClassVar[Iterator[bool]] = itertools.cycle((True, False))


class Threshold(ReferenceConnector):
    """D loads nothing when fewer than 40 tokens are missing: to compute them is cheaper.

    As vLLM's NixlConnector with kv_recompute_threshold.
    """

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (tokens, asynchronous) if tokens and tokens >= 40 else (0, False)


class Chunked(StopsElsewhere):
    """D loads whole chunks of 256 tokens only, as LMCacheConnectorV1, and takes no model in which P does not
    keep the KV of every token.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        if not keeps_every_token(kv_cache_config):
            raise ValueError("states and sliding windows are not supported: they end at no chunk")
        super().__init__(vllm_config, role, kv_cache_config)

    def stop(self, stop: int, block: int) -> int:
        return stop // CHUNK * CHUNK


class PartOfABlock(StopsElsewhere):
    """The load ends inside the last whole block, and D computes the rest of this block, as behind the last
    chunk of LMCacheConnectorV1 with save_unfull_chunk.
    """

    def stop(self, stop: int, block: int) -> int:
        return max(0, stop // block * block - block // 2)


# ---- wrong ones --------------------------------------------------------------------------------------------


class MovesNothing(ReferenceConnector):
    """D loads nothing of any prompt."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False
