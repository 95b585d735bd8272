"""Boxes against vLLM: its own functions allocate, view and, on CPU, write memory that boxes must describe."""

from __future__ import annotations

import ctypes
import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from model_matrix.geometries import Mla, State, expand_layers, load_geometries
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import kv_heads, layer_specs, possible
from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports
from reference_connector import boxes
from reference_connector.boxes import Box, boxes_of
from reference_connector.plan import Table, Unplannable, pair, runs

BLOCKS = 6
GEOMETRIES = load_geometries()


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    mend_imports()


def a_config(geometry: str, layers: dict[str, Any]) -> Any:
    """As much of a VllmConfig as boxes need."""
    found = GEOMETRIES[geometry]

    def model(config: Any) -> Any:
        return SimpleNamespace(
            get_total_num_kv_heads=lambda: config.get("num_key_value_heads", config["num_attention_heads"]),
            get_total_num_hidden_layers=lambda: config["num_hidden_layers"],
        )

    return SimpleNamespace(
        model_config=model(found.config),
        speculative_config=SimpleNamespace(draft_model_config=model(found.draft_config))
        if found.draft_config
        else None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


class Made:
    """KV memory of one rank that vLLM allocated for layers of a geometry, and its boxes."""

    def __init__(
        self,
        geometry: str,
        names: list[list[str]],
        layout: str,
        tp: int,
        rank: int,
        block: int,
        kernel: int = 0,
        cpu: bool = False,
        shards: int | None = 1,  # `max_tp_shards` of latent attention; Kimi's has None in vLLM 0.31
    ):
        import torch
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
        from vllm.v1.kv_cache_interface import (
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
            MambaSpec,
            UniformTypeKVCacheSpecs,
            compute_layout_strides,
        )
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        from pytest_kvconform.rigs.bytes.layers import Layer, PackedBackend

        specs = layer_specs(GEOMETRIES[geometry], tp, block, kernel_block=16)
        for name in names_of(geometry, Mla, len(specs)):
            specs[name] = dataclasses.replace(specs[name], max_tp_shards=shards)
        self.specs = {name: specs[name] for group in names for name in group}
        groups, tensors, outer = [], [], layout[0] == "B"
        row = max(sum(self.specs[name].page_size_bytes for name in group) for group in names)
        for group in names:
            of_group, at = {name: specs[name] for name in group}, 0
            one = len(set(of_group.values())) == 1
            spec = (
                specs[group[0]] if one else UniformTypeKVCacheSpecs(block_size=block, kv_cache_specs=of_group)
            )
            groups.append(KVCacheGroupSpec(group, spec))
            for alike in [
                [name for name in group if specs[name] == kind] for kind in dict.fromkeys(of_group.values())
            ]:
                page = specs[alike[0]].page_size_bytes
                strides = (page, row) if outer else (page * BLOCKS, page)
                if layout in ("LHBNC", "BHLNC"):  # heads lie between layers and blocks
                    strides = compute_layout_strides(
                        specs[alike[0]], BLOCKS, len(alike), KVCacheLayout[layout]
                    )[:2]
                tensors.append(KVCacheTensor(row * BLOCKS, alike, *strides, offset=at))
                at += page * len(alike) * (1 if outer else BLOCKS)
        self.kv_config = KVCacheConfig(BLOCKS, tensors, groups)
        kernels = [
            kernel or block if not isinstance(specs[group[0]], MambaSpec) else specs[group[0]].block_size
            for group in names
        ]
        self.caches = allocate_kv_cache(self.kv_config, torch.device("cpu"), KVCacheLayout[layout], kernels)
        self.layers = {
            name: Layer(CPUAttentionBackend if cpu else PackedBackend, False) for name in self.specs
        }
        for name, layer in self.layers.items():
            layer.spec = self.specs[name]
            layer.bind_kv_cache(self.caches[name])
        self.storage = next(iter(self.caches.values())).untyped_storage()
        self.config = a_config(geometry, self.layers)
        self.boxes = boxes_of(self.config, self.kv_config, self.caches, rank, tp)

    def of(self, layer: str) -> dict[str, Box]:
        return {box.part: box for box in self.boxes if box.layer == layer}

    def cell(self, box: Box, block: int, token: int, *at: int) -> bytes:
        """Bytes of a cell by the formula of boxes.py; coordinates are absolute."""
        address = box.address + block * box.block_stride + token * box.token_stride
        address += sum((c - axis.start) * axis.stride for c, axis in zip(at, box.axes, strict=True))
        assert (
            self.storage.data_ptr() <= address <= self.storage.data_ptr() + self.storage.nbytes() - box.width
        )
        assert all(axis.start <= c < axis.stop for c, axis in zip(at, box.axes, strict=True))
        return ctypes.string_at(address, box.width)


def content(tensor: Any) -> bytes:
    """Bytes of a tensor in the order of its elements."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def scribble(made: Made) -> None:
    import torch

    whole = torch.empty(0, dtype=torch.uint8).set_(made.storage)
    whole[:] = torch.from_numpy(np.random.default_rng(1).integers(0, 256, len(whole), np.uint8))


def names_of(geometry: str, kind: type | None = None, many: int = 2) -> list[str]:
    """Layers of a kind (default: those that are neither latent nor states)."""
    of = [
        layer.name
        for layer in expand_layers(GEOMETRIES[geometry])
        if (isinstance(layer.kind, kind) if kind else _plain(layer.kind))
    ]
    return of[:many]


def _plain(kind: Any) -> bool:
    return not isinstance(kind, Mla | State)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("kernel", [64, 16], ids=["whole", "pieces"])
def test_attention_lies_where_vllm_views_it(layout: str, kernel: int) -> None:
    if layout not in ("LBHNC", "LBNHC"):
        kernel = 64  # vLLM cuts no blocks there
    names = names_of("llama3_1_8b")
    made = Made("llama3_1_8b", [names], layout, tp=2, rank=1, block=64, kernel=kernel)
    scribble(made)
    for name in names:
        box, view = made.of(name)["kv"], made.caches[name]
        assert [(axis.name, axis.start, axis.stop, axis.whole) for axis in box.axes] == [("head", 4, 8, 8)]
        assert (box.tokens * box.pieces, box.num_blocks // box.pieces, box.element) == (
            64,
            BLOCKS,
            "bfloat16",
        )
        for block, head, token in [(0, 0, 0), (1, 3, 5), (3, 2, 63), (5, 1, 16), (5, 3, 63)]:
            kernel_block, slot = block * (64 // kernel) + token // kernel, token % kernel
            mine, within = divmod(block * 64 + token, box.tokens)
            assert made.cell(box, mine, within, 4 + head) == content(view[kernel_block, head, slot])


def test_latent_attention_with_a_draft_in_one_group() -> None:
    names = [*names_of("kimi_k2_5_eagle3", Mla), *names_of("kimi_k2_5_eagle3")]
    made = Made("kimi_k2_5_eagle3", [names], "LBHNC", tp=4, rank=3, block=16)
    scribble(made)
    for name in names:
        box, view = made.of(name)["kv"], made.caches[name]
        start = box.axes[0].start
        assert (start, box.axes[0].whole) == (
            (0, 1) if name in names[:2] else (3 * view.shape[1], 4 * view.shape[1])
        )
        assert made.cell(box, 3, 7, start) == content(view[3, 0, 7])


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("order", ["DS", "SD"])
@pytest.mark.parametrize(("geometry", "other"), [("qwen3_5_35b_a3b", None), ("kimi_linear_48b", Mla)])
def test_states_lie_where_vllm_binds_them(
    geometry: str, other: Any, order: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q, K and V of the convolution, and ssm, of a state that shares memory with attention."""
    from vllm.model_executor.layers.mamba import mamba_utils

    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: order)
    states, block = names_of(geometry, State), 2048
    made = Made(geometry, [names_of(geometry, other), states], layout, tp=2, rank=1, block=block)
    scribble(made)
    for name in states:
        kind = next(layer.kind for layer in expand_layers(GEOMETRIES[geometry]) if layer.name == name)
        conv, ssm = made.layers[name].kv_cache
        conv = conv if order == "DS" else conv.transpose(1, 2)
        at = 0
        for part, whole in zip(("conv.q", "conv.k", "conv.v"), kind.conv_channels, strict=True):
            box = made.of(name)[part]
            assert (box.group, box.tokens * box.pieces, box.axes[0].start, box.axes[0].whole) == (
                1,
                1,
                whole // 2,
                whole,
            )
            for channel, tap in [(0, 0), (1, 2), (whole // 2 - 1, 1)]:
                assert made.cell(box, 4, 0, whole // 2 + channel, tap) == content(conv[4, at + channel, tap])
            at += whole // 2
        box = made.of(name)["ssm"]
        assert (box.axes[0].start, box.axes[0].whole) == (kind.value_heads // 2, kind.value_heads)
        assert made.cell(box, 5, 0, kind.value_heads - 1) == content(ssm[5, -1])


@pytest.mark.parametrize("block", [32, 64])
def test_cpu_attention_lies_where_its_kernel_writes_it(block: int) -> None:
    """Every element of a token, as the kernel writes it: K with tokens, V with elements side by side."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    (name,) = names_of("llama3_1_8b", many=1)
    made = Made("llama3_1_8b", [[name]], "LBHNC", tp=2, rank=1, block=block, cpu=True)
    found, view = made.of(name), made.caches[name]
    isa = _get_attn_isa(torch.bfloat16, block, 128, "auto")
    assert set(found) == ({"tile"} if isa == "amx" else {"tile", "k", "v"})
    k, v = (torch.randn(3, 4, 128).bfloat16() for _ in range(2))
    slots = torch.tensor([2 * block + 1, 2 * block + 17, 4 * block - 1])
    cache = view.view(BLOCKS, 4, 2 * block, 128).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k, v, *cache, slots, isa, 1.0, 1.0, "auto")
    assert made.cell(found["tile"], 2, 0, 5) == content(view[2, 1])
    if isa == "amx":
        return
    for token, slot in enumerate(slots.tolist()):
        for head in range(4):
            where = *divmod(slot, block), 4 + head
            assert b"".join(made.cell(found["k"], *where, element) for element in range(128)) == content(
                k[token, head]
            )
            assert made.cell(found["v"], *where) == content(v[token, head])


def test_cpu_attention_with_blocks_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a hand-over from blocks of 32, D has what the generic kernel writes into blocks of 64."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    (name,) = names_of("llama3_1_8b", many=1)
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "vec")
    k, v = (torch.randn(77, 4, 128).bfloat16() for _ in range(2))
    p, d, due = (Made("llama3_1_8b", [[name]], "LBHNC", 2, 1, block, cpu=True) for block in (32, 64, 64))
    for made, table, block in ((p, [4, 1, 3], 32), (due, [2, 5], 64)):
        slots = torch.tensor([table[t // block] * block + t % block for t in range(77)])
        cache = made.caches[name].view(BLOCKS, 4, 2 * block, 128).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(k, v, *cache, slots, "vec", 1.0, 1.0, "auto")
    found = runs(pair(d.boxes, [p.boxes]), [(0, 77)], [Table([2, 5])], [Table([4, 1, 3])])[0]
    for local, remote, length in zip(
        found.local.tolist(), found.remote.tolist(), found.length.tolist(), strict=True
    ):
        ctypes.memmove(local, remote, length)
    assert torch.equal(d.caches[name], due.caches[name])


def test_cpu_attention_of_amx_with_blocks_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel packs the K of a block into tiles, which cannot be cut: such a pair is refused."""
    from vllm.v1.attention.backends import cpu_attn

    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "amx")
    names = [names_of("llama3_1_8b", many=1)]
    small, large = (Made("llama3_1_8b", names, "LBHNC", 2, 1, block, cpu=True).boxes for block in (32, 64))
    assert [box.part for box in small] == ["tile"]
    assert pair(small, [small]).matches
    with pytest.raises(Unplannable, match=r"^tile of layer .*: D has "):
        pair(large, [small])


@pytest.mark.parametrize("shards", [1, None])
@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
def test_heads_of_every_rank(geometry: str, shards: int | None) -> None:
    """Ranges of heads over all topologies, the draft's layers and replicated heads included."""
    names = [
        *names_of(geometry, Mla, 1),
        *dict.fromkeys([*names_of(geometry, None, 1), *names_of(geometry, None, 1000)[-1:]]),
    ]
    kinds = {layer.name: layer.kind for layer in expand_layers(GEOMETRIES[geometry])}
    for tp in (tp for tp in (1, 2, 4, 8, 16) if not possible(GEOMETRIES[geometry], tp)):
        for rank, name in ((rank, name) for rank in range(tp) for name in names):
            block = 2048 if names_of(geometry, State) else 16
            made = Made(geometry, [[name]], "LBHNC", tp, rank, block, shards=shards)
            axis = made.of(name)["kv"].axes[0]
            first, number = kv_heads(kinds[name], tp, rank)
            assert (axis.start, axis.stop - axis.start) == (first, number)
            assert axis.whole == (1 if isinstance(kinds[name], Mla) else kinds[name].kv_heads)


def test_heads_of_a_draft_that_has_fewer_than_its_model() -> None:
    """Rank 5 of 8 has head 5 of the model's 8, and head 1 of the draft's 2."""

    def model(heads: int) -> Any:
        return SimpleNamespace(get_total_num_kv_heads=lambda: heads, get_total_num_hidden_layers=lambda: 4)

    config = SimpleNamespace(
        model_config=model(8),
        speculative_config=SimpleNamespace(draft_model_config=model(2)),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    assert boxes._heads(config, "model.layers.3.self_attn.attn", None, 1, 5, 8) == (5, 6, 8)
    assert boxes._heads(config, "model.layers.4.self_attn.attn", None, 1, 5, 8) == (1, 2, 2)


def test_boxes_travel_and_are_small() -> None:
    names = names_of("deepseek_v3", Mla, 61)
    made = Made("deepseek_v3", [names], "LBHNC", tp=2, rank=0, block=16).boxes
    encoded = msgspec.msgpack.encode(made)
    assert msgspec.msgpack.decode(encoded, type=tuple[Box, ...]) == made and len(made) == 61
    assert len(encoded) < 150 * 61


def test_layers_without_memory_of_their_own_have_no_box() -> None:
    names = names_of("llama3_1_8b", many=3)
    made = Made("llama3_1_8b", [names], "LBHNC", tp=1, rank=0, block=16)
    made.kv_config.kv_cache_groups[0].layer_names.append("shares")
    made.caches["shares"] = made.caches[names[0]]
    assert boxes_of(made.config, made.kv_config, made.caches, 0, 1) == made.boxes
    del made.caches[names[1]]
    with pytest.raises(ValueError, match=f"vLLM registered no KV cache for layer {names[1]}"):
        boxes_of(made.config, made.kv_config, made.caches, 0, 1)


def states(order: str, patch: pytest.MonkeyPatch) -> None:
    test_states_lie_where_vllm_binds_them("kimi_linear_48b", Mla, order, "LBHNC", patch)
