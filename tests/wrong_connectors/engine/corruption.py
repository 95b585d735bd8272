"""The KV cache of D is corrupted after the read."""

from __future__ import annotations

from typing import Any, ClassVar

from .right import Groups, Right


class CorruptsCache(Right):
    """`corrupt` changes D's cache when a read has ended, before vLLM is notified."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        # kv_caches has states as rows of bytes
        self.layers = self._vllm_config.compilation_config.static_forward_context
        self.targets = dict[str, Groups]()
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.targets.update(
            {name: meta.local_block_ids for name, meta in self.loads().items() if any(meta.local_block_ids)}
        )
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request in results.finished_recving:
            groups = self.kv_cache_config.kv_cache_groups
            for group, blocks in zip(groups, self.targets.pop(request), strict=True):
                self.corrupt([self.layers[name].kv_cache for name in group.layer_names], blocks)
        return results

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        """`layers` are the caches of one group.

        They are tensors [block, head, ...], or pairs (convolution, recurrent) of [block, ...].
        """
        raise NotImplementedError


class OneBit(CorruptsCache):
    """One bit of one word of all that was read is wrong."""

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        raw = layers[-1][blocks[0]].view(dtype=layers[-1].dtype).flatten(1)
        words = raw.view({4: _torch().int32, 2: _torch().int16}[raw.element_size()])
        words[1, 5] ^= 1


class SwapsHeads(CorruptsCache):
    """Heads 0 and 1 are exchanged."""

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        for cache in layers:
            cache[blocks] = cache[blocks].flip(1)


class SwapsLayers(CorruptsCache):
    """The first two layers are exchanged."""

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        first, second = layers[0][blocks].clone(), layers[1][blocks].clone()
        layers[0][blocks], layers[1][blocks] = second, first


class ForgetsLayer(CorruptsCache):
    """The last layer holds zeros."""

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        layers[-1][blocks] = 0


class ZeroesHits(CorruptsCache):
    """D zeroes all blocks of a request but the last before it loads. What its prefix cache has stays zero."""

    tables: ClassVar[list[Groups]] = []  # of D, whose halves are in one process

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self.tables.append(blocks.get_block_ids())
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        while self.tables:
            for group, blocks in zip(self.kv_cache_config.kv_cache_groups, self.tables.pop(), strict=True):
                for name in group.layer_names:
                    self.layers[name].kv_cache[blocks[:-1]] = 0
        super().start_load_kv(forward_context, **kwargs)

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        """What is loaded stays as it is."""


class LeavesDraft(CorruptsCache):
    """The KV of the draft model, the last layer, is not loaded."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.loads():
            *_, last = self.kv_cache_config.kv_cache_groups[0].layer_names
            self.before = self.layers[last].kv_cache.clone()
        super().start_load_kv(forward_context, **kwargs)

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        layers[-1][blocks] = self.before[blocks]


class DraftLateByOne(CorruptsCache):
    """The last block of the draft model's KV is the one before it."""

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        layers[-1][blocks[-1]] = layers[-1][blocks[-2]]


class RollsConvolution(CorruptsCache):
    """The convolution state is off by one position."""

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        for conv, _ in (pair for pair in layers if isinstance(pair, (tuple, list))):
            conv[blocks] = conv[blocks].roll(1, -1)


class ZeroesState(CorruptsCache):
    """The recurrent state is zero."""

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        for _, recurrent in (pair for pair in layers if isinstance(pair, (tuple, list))):
            recurrent[blocks] = 0


class LeavesState(CorruptsCache):
    """The recurrent state of a group's first layer stays what was in its slot before the load."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.loads():
            firsts = [self.layers[group.layer_names[0]] for group in self.kv_cache_config.kv_cache_groups]
            pairs = (layer.kv_cache for layer in firsts if isinstance(layer.kv_cache, (tuple, list)))
            self.before = {id(pair): pair[1].clone() for pair in pairs}
        super().start_load_kv(forward_context, **kwargs)

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        if isinstance(layers[0], (tuple, list)):
            layers[0][1][blocks] = self.before[id(layers[0])][blocks]


class ForgetsLatent(CorruptsCache):
    """The last rank's copy of the latent rows holds zeros."""

    def corrupt(self, layers: list[Any], blocks: list[int]) -> None:
        from vllm.distributed import get_tp_group

        if get_tp_group().is_last_rank and not isinstance(layers[0], (tuple, list)):
            for cache in layers:  # [kernel block, token, word]
                cache.unflatten(0, (self.kv_cache_config.num_blocks, -1))[blocks] = 0


def _torch() -> Any:
    import torch

    return torch
