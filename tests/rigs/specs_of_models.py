# ruff: noqa: E402 - the environment and the imports must be mended before vLLM is imported
"""Print, as JSON, the KV cache specs of vLLM's own models beside those of `kv_cache_specs`.

vLLM's models are built on the meta device.

test_geometry.py starts it as a process of its own: vLLM takes 10 s to import and leaves much behind. All
layers are real; where a model cannot be built on CPU as it is, only parts without KV are changed (CHANGES).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",  # read once, at the first state
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_KIMI_K3_GEMM_AR": "0",  # kernels of CUDA, imported by the model's constructor
    "VLLM_ENABLE_GEMM_RS": "0",
}

from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports

mend_imports()

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

from model_matrix.geometries import Geometry, load_geometries
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import block_size_of, layer_specs

MAX_MODEL_LEN = 4096
# of the experts: vLLM's CPU kernels do not take 2880 split by 4 or 8
CHANGES = {"gpt_oss": {"intermediate_size": 4096}}
# (tensor parallel size, block size asked for, kv_cache_dtype, prefix caching). 48
# is no multiple of the kernels' 32
CASES = [(tp, 32, "auto", True) for tp in (1, 2, 4, 8)] + [
    (1, 48, "auto", True),
    (2, 128, "auto", False),
    (2, 64, "fp8", True),
]


def config_of(
    geometry: Geometry, folder: Path, tp: int, block_size: int, cache_dtype: str, prefix_caching: bool
) -> VllmConfig:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(geometry.config | CHANGES.get(geometry.family, {})))
    model = ModelConfig(
        model=str(folder), dtype=geometry.dtype, skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN
    )
    parallel = ParallelConfig(tensor_parallel_size=tp)
    config = VllmConfig(
        model_config=model,
        parallel_config=parallel,
        cache_config=CacheConfig(
            block_size=block_size, cache_dtype=cache_dtype, enable_prefix_caching=prefix_caching
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=MAX_MODEL_LEN,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=False,
        ),
        device_config=DeviceConfig("cpu"),
    )
    if geometry.draft_config:
        (folder / "draft").mkdir()
        (folder / "draft" / "config.json").write_text(json.dumps(geometry.draft_config))
        config.speculative_config = SpeculativeConfig(
            model=str(folder / "draft"),
            method="eagle3",
            num_speculative_tokens=1,
            target_model_config=model,
            target_parallel_config=parallel,
        )
    return config


def build(config: VllmConfig) -> dict[str, Any]:
    """Layer name -> spec that the model's layer returns, after the platform has chosen the block size."""
    models = [config.model_config]
    if config.speculative_config:
        models.append(config.speculative_config.draft_model_config)
    # all that a layer's constructor asks
    parallel_state.get_tp_group().world_size = config.parallel_config.tensor_parallel_size
    with (
        set_current_vllm_config(config),
        torch.device("meta"),
        set_default_torch_dtype(config.model_config.dtype),
    ):
        for model in models:
            ModelRegistry.resolve_model_cls(model.architecture, model_config=model)[0](
                vllm_config=config, prefix=""
            )
    current_platform.update_block_size_for_backend(config)
    layers = config.compilation_config.static_forward_context
    with set_current_vllm_config(config):
        return {
            name: layer.get_kv_cache_spec(config)
            for name, layer in layers.items()
            if hasattr(layer, "get_kv_cache_spec")
        }


def outcome(geometry: Geometry, folder: Path, case: tuple[int, int, str, bool]) -> dict[str, Any]:
    tp, wanted, cache_dtype, prefix_caching = case
    try:
        config = config_of(geometry, folder, tp, wanted, cache_dtype, prefix_caching)
        theirs = build(config)
    except (ValueError, AssertionError) as error:  # refused: pydantic's error is a ValueError
        return {"refused": str(error)}
    # grouping asks for it; the engine core resolves it otherwise
    config.cache_config.kv_cache_layout = "LBHNC"
    block_size = block_size_of(geometry, tp, wanted, cache_dtype)
    ours = layer_specs(
        geometry, tp, block_size, cache_dtype, prefix_caching=prefix_caching, max_model_len=MAX_MODEL_LEN
    )
    return {
        "block_sizes": [config.cache_config.block_size, block_size],
        "theirs": [[name, repr(spec)] for name, spec in theirs.items()],
        "ours": [[name, repr(spec)] for name, spec in ours.items()],
        "groups": [len(group.layer_names) for group in get_kv_cache_groups(config, ours)],
    }


def main() -> None:
    place = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    geometries = load_geometries()
    for geometry in geometries.values():
        for config in filter(None, (geometry.config, geometry.draft_config)):
            [architecture] = config["architectures"]
            # A class that is registered is not inspected in a subprocess, which would import vLLM once more.
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    parallel_state.init_distributed_environment(1, 0, f"file://{place}/store", 0, "gloo")
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        parallel_state.initialize_model_parallel(1)
    results = {}
    # Without AMX the CPU platform sets blocks of 16 and no prefix caching for latent attention:
    # limits of a kernel that is not run here. Streams of CUDA are made by the constructor of Kimi
    # Linear and used by its forward only.
    with (
        patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True),
        patch.object(torch.cuda, "Stream", lambda: None),
    ):
        for geometry in geometries.values():
            for case in CASES:
                key = " ".join(map(str, (geometry.id, *case)))
                results[key] = outcome(geometry, place / key.replace(" ", "_"), case)
    print("specs:", json.dumps(results))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's group would be torn down with warnings
