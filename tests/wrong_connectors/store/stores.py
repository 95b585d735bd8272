"""A right store, and stores with one mistake each.

Engines import this module by its name: it lies in a folder of PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
    ReqMeta,
)

from tests.right_connectors.stores import WholeBlocks


class Right(ExampleConnector):
    """Saves whole blocks when the last one is complete, finds them again, and loads what D lacks.

    vLLM's ExampleConnector does neither of these: see docs/findings.md.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        model = vllm_config.model_config
        self.shape = vllm_config.parallel_config.tensor_parallel_size, self._block_size
        self.engine = model.model, str(model.dtype), vllm_config.cache_config.cache_dtype
        self.rank = vllm_config.parallel_config.rank
        self.known: dict[str, Any] = {}  # requests that are under way
        self.blocks: dict[str, list[int]] = {}
        self.loads: dict[str, int] = {}  # request -> tokens that it has already

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # save_kv_layer saves

    # ---- scheduler half --------------------------------------------------------------------------

    def whole(self, tokens: Any) -> int:
        """Tokens of the whole blocks before the last token."""
        return (len(tokens) - 1) // self._block_size * self._block_size

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.known[request.request_id] = request
        self.loads.pop(request.request_id, None)
        return max(0, self.found(request) - num_computed_tokens), False

    def found(self, request: Any) -> int:
        """Tokens of a prompt that are saved."""
        tokens = self.tokens(request)
        return len(tokens) if self.saved(tokens, self.extra(request)) else 0

    def tokens(self, request: Any) -> torch.Tensor:
        """The tokens of a prompt that a store may keep; zeros in the place of embeddings."""
        prompt = torch.tensor(request.all_token_ids[: request.num_prompt_tokens])
        return prompt[: self.whole(prompt)]

    def extra(self, request: Any) -> list[str]:
        """All that tells a prompt from others of the same tokens."""
        adapter = request.lora_request
        embeddings = request.prompt_embeds
        return [
            f"salt {request.cache_salt}",
            f"adapter {(adapter.lora_name, adapter.lora_path) if adapter else None}",
            f"embeddings {None if embeddings is None else embeddings.float().numpy().tobytes().hex()}",
            *(f"{image.identifier} at {image.mm_position.offset}" for image in request.mm_features),
        ]

    def saved(self, tokens: torch.Tensor, extra: list[str]) -> bool:
        return len(tokens) > 0 and Path(self._generate_foldername_debug(tokens, extra)).exists()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loads[request.request_id] = self.found(request) - num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> ExampleConnectorMetadata:
        meta, cached = ExampleConnectorMetadata(), scheduler_output.scheduled_cached_reqs
        steps = [
            (new.req_id, new.num_computed_tokens, new.block_ids, True)
            for new in scheduler_output.scheduled_new_reqs
        ]
        for name, done, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            steps.append((name, done, blocks, name in cached.resumed_req_ids))
        for name, done, blocks, fresh in steps:
            self.blocks[name] = ([] if fresh else self.blocks[name]) + list(blocks[0] if blocks else [])
            tokens, extra = self.tokens(self.known[name]), self.extra(self.known[name])
            end = done + scheduler_output.num_scheduled_tokens[name]
            if name in self.loads:
                meta.requests.append(self.part(tokens, name, self.loads.pop(name), is_store=False))
            elif done < len(tokens) <= end and not self.saved(tokens, extra):
                meta.requests.append(self.part(tokens, name, 0, is_store=True))
        return meta

    def part(self, tokens: torch.Tensor, name: str, first: int, is_store: bool) -> ReqMeta:
        """Tokens [first, all) of a request, and where they lie."""
        positions = torch.arange(first, len(tokens))
        slots = (
            torch.tensor(self.blocks[name])[positions // self._block_size] * self._block_size
            + positions % self._block_size
        )
        return ReqMeta(tokens, slots, is_store, self.extra(self.known[name]))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        for of_requests in (self.known, self.blocks, self.loads):
            of_requests.pop(request.request_id, None)
        return False, None

    # ---- both halves: what is saved belongs to engines of one shape ------------------------------

    def _generate_foldername_debug(
        self, token_ids: torch.Tensor, mm_hashes: list[str], create_folder: bool = False
    ) -> str:
        return str(
            super()._generate_foldername_debug(
                self.key(token_ids), [*mm_hashes, str(self.shape), str(self.engine)], create_folder
            )
        )

    def key(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def _generate_filename_debug(self, layer_name: str, token_ids: torch.Tensor, mm_hashes: list[str]) -> str:
        return str(super()._generate_filename_debug(f"{self.rank}.{layer_name}", token_ids, mm_hashes))

    # ---- worker half -----------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        layers = {name: layer.kv_cache for name, layer in forward_context.no_compile_layers.items()}
        for request in self._get_connector_metadata().requests:
            for name in () if request.is_store else layers:
                self.load(name, request, layers)

    def load(self, name: str, request: ReqMeta, layers: dict[str, torch.Tensor]) -> None:
        """Load one layer of a request."""
        saved = self.read(name, request, list(layers))
        slots = self.slots(request.slot_mapping)
        blocks, offsets = slots // self._block_size, slots % self._block_size
        layers[name][blocks, :, offsets] = saved[len(request.token_ids) - len(slots) : len(request.token_ids)]

    def read(self, layer: str, request: ReqMeta, layers: list[str]) -> torch.Tensor:
        file = self._generate_filename_debug(layer, request.token_ids, request.mm_hashes)
        return safetensors.torch.load_file(file)["kv_cache"]

    def slots(self, slots: torch.Tensor) -> torch.Tensor:
        return slots


class NeverSaves(Right):
    """Forgets."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass


class AnnouncesLess(Right):
    """Leaves out a block."""

    def found(self, request: Any) -> int:
        return max(0, super().found(request) - self._block_size)


class LoadsNothing(Right):
    """Announces, and does not read."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass


class LoadsLateByOne(Right):
    """Every block gets what belongs to the one before it."""

    def read(self, layer: str, request: ReqMeta, layers: list[str]) -> torch.Tensor:
        return super().read(layer, request, layers).roll(self._block_size, 0)


class WrongLayer(Right):
    """The first layer gets what belongs to the second."""

    def read(self, layer: str, request: ReqMeta, layers: list[str]) -> torch.Tensor:
        return super().read(layers[1] if layer == layers[0] else layer, request, layers)


class SwapsPlanes(Right):
    """K and V are exchanged."""

    def read(self, layer: str, request: ReqMeta, layers: list[str]) -> torch.Tensor:
        saved = super().read(layer, request, layers)
        return saved.roll(saved.shape[-1] // 2, -1)


class CountsTokens(Right):
    """Prompts of one length are the same to it: it serves what the last one left."""

    def key(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tokens, 1)

    def extra(self, request: Any) -> list[str]:
        return []


class FirstBlockOnly(Right):
    """Prompts that begin alike are the same to it."""

    def key(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[: self._block_size]


class OverwritesHits(Right):
    """Writes the whole prompt, and so into blocks of D's prefix cache, as vLLM's ExampleConnector does."""

    def part(self, tokens: torch.Tensor, name: str, first: int, is_store: bool) -> ReqMeta:
        return super().part(tokens, name, 0, is_store)


class DropsWithADraft(WholeBlocks):
    """No mistake: with a draft model it leaves out the last block, as vLLM's own prefix cache."""

    drops = 1

    def found(self, keys: list[str]) -> int:
        return max(0, super().found(keys) - self.drops * self.drafts)


class DropsTwoWithADraft(DropsWithADraft):
    """Leaves out another block."""

    drops = 2
