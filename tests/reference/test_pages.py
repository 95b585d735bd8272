"""Backends whose blocks are not heads x tokens: whole blocks arrive, or the pair is refused in a sentence.

Their specs are what `customize_spec` of each backend makes of vLLM's AttentionSpec. The backends themselves
cannot be imported on a CPU.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports
from reference_connector.boxes import Box, _attention_boxes, _heads
from reference_connector.plan import Table, Unplannable, pair, runs

BLOCKS, TOKENS, HEADS, SIZE = 6, 16, 8, 64
BACKENDS = ("FLASHINFER", "ROCM_ATTN", "ROCM_AITER_FA", "B12X")


def spec_of(backend: str, heads: int, tokens: int) -> Any:
    """The spec of a rank with so many KV heads."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    common = {"block_size": tokens, "num_kv_heads": heads, "head_size": SIZE}
    if backend == "FLASHINFER":  # with NVFP4: fp4 numbers and a scale for each 16 of them
        spec = FullAttentionSpec(**common, dtype=torch.uint8, kv_quant_mode=KVQuantMode.NVFP4)
        return replace(spec, num_head_slots=2 * heads, state_content_bytes=SIZE // 2 + SIZE // 16)
    spec = FullAttentionSpec(**common, dtype=torch.bfloat16)
    if backend == "FLASH_ATTN":
        return spec
    return replace(spec, num_head_slots=2, state_content_bytes=heads * SIZE * 2)


class Rank:
    """KV memory of one layer of a rank, as vLLM views it, and its boxes."""

    def __init__(
        self,
        backend: str,
        patch: pytest.MonkeyPatch,
        layout: str = "LBHNC",
        tokens: int = TOKENS,
        rank: int = 0,
        size: int = 1,
    ):
        import torch
        from vllm.distributed.kv_transfer.kv_connector import utils
        from vllm.v1.kv_cache_interface import KVCacheTensor, compute_layout_strides, create_kv_cache_views
        from vllm.v1.kv_cache_layout import KVCacheLayout

        spec = spec_of(backend, HEADS // size, tokens)
        self.memory = torch.zeros(BLOCKS * spec.page_size_bytes, dtype=torch.int8)
        strides = compute_layout_strides(spec, BLOCKS, 1, KVCacheLayout[layout])
        tensor = KVCacheTensor(len(self.memory), ["l"], *strides[:2], offset=0)
        (self.view,) = create_kv_cache_views(self.memory, spec, BLOCKS, KVCacheLayout[layout], tensor)
        patch.setattr(
            utils, "get_current_attn_backends", lambda *_: [SimpleNamespace(get_name=lambda: backend)]
        )
        config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="nvfp4"))
        here = self.view.shape[1] if spec.num_head_slots is None else spec.num_kv_heads
        heads = _heads(None, "l", spec.max_tp_shards, here, rank, size)
        box = partial(Box, layer="l", group=0)
        self.boxes: tuple[Box, ...] = tuple(_attention_boxes(config, box, spec, self.view, heads, 1))


def fill(rank: Rank) -> None:
    values = np.random.default_rng(7).integers(1, 127, len(rank.memory), np.int8)
    rank.memory.numpy()[:] = values


@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_blocks_arrive(backend: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = (Rank(backend, monkeypatch, layout) for _ in "pd")
    fill(p)
    tokens = TOKENS + 5  # a whole block and a part, which has bytes everywhere in its block
    plan = runs(pair(d.boxes, [p.boxes]), [(0, tokens)], [Table([3, 1])], [Table([2, 5])])[0]
    for local, remote, length in zip(
        plan.local.tolist(), plan.remote.tolist(), plan.length.tolist(), strict=True
    ):
        ctypes.memmove(local, remote, length)
    for mine, theirs in ((3, 2), (1, 5)):
        assert (d.view[mine] == p.view[theirs]).all() and d.view[mine].any()
    assert not d.view[[0, 2, 4, 5]].any(), "and nothing else"
    assert plan.nbytes == 2 * math.prod(p.view.shape[1:]) * p.view.element_size()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("of_p", "of_d", "why"),
    [
        ({}, {"rank": 0, "size": 2}, r"tile of layer l: D has .* and rank 0 of P has "),
        ({"tokens": 32}, {}, r"tile of layer l: D has .* and rank 0 of P has "),
    ],
    ids=["heads", "block size"],
)
def test_what_cannot_be_exchanged_is_refused(
    backend: str, of_p: Any, of_d: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, rank 0 of D got K of all heads where K and V of its own belong."""
    p, d = Rank(backend, monkeypatch, **of_p), Rank(backend, monkeypatch, **of_d)
    with pytest.raises(Unplannable, match=why):
        pair(d.boxes, [p.boxes])


def test_two_backends_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = Rank("ROCM_ATTN", monkeypatch), Rank("B12X", monkeypatch)
    with pytest.raises(Unplannable, match="D has elements bfloat16 of B12X, and rank 0 of P has bfloat16 of"):
        pair(d.boxes, [p.boxes])
    plain = Rank("FLASH_ATTN", monkeypatch)
    assert [box.part for box in plain.boxes] == ["kv"]
    with pytest.raises(Unplannable, match="P has no tile of layer l"):
        pair(d.boxes, [plain.boxes])


@pytest.fixture(autouse=True)
def _imports() -> None:
    mend_imports()
