"""The one builder of vLLM's engine configuration, and of the KV cache configurations that belong to it.

vLLM is imported inside functions only.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from model_matrix.geometries import Geometry
from pytest_kvconform.rigs.processes.place import FOLDER_OF_NODES
from pytest_kvconform.rigs.vllm_setup.compat import generate_scheduler_kv_cache_config, get_kv_cache_configs
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import block_size_of

DRAFT = "draft"  # folder of the draft's config.json within that of the model
PLENTY = 1 << 44  # bytes of KV memory: the size of a pool is given in blocks instead


def engine_config(
    model: str,
    *,
    dtype: str,
    block_size: int,
    max_model_len: int,
    max_batched_tokens: int,
    max_seqs: int,
    tensor_parallel: int,
    kv_transfer: dict[str, Any],
    num_blocks: int | None = None,
    cache_dtype: str = "auto",
    prefix_caching: bool = True,
    more: dict[str, Any] | None = None,
) -> Any:
    """The VllmConfig of one engine, see `engine_arguments`."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = engine_arguments(
        model,
        dtype=dtype,
        block_size=block_size,
        max_model_len=max_model_len,
        max_batched_tokens=max_batched_tokens,
        max_seqs=max_seqs,
        tensor_parallel=tensor_parallel,
        kv_transfer=kv_transfer,
        num_blocks=num_blocks,
        cache_dtype=cache_dtype,
        prefix_caching=prefix_caching,
        more=more,
    )
    return EngineArgs(**arguments).create_engine_config()


def engine_arguments(
    model: str,
    *,
    dtype: str,
    block_size: int | None,
    max_model_len: int,
    max_batched_tokens: int,
    max_seqs: int,
    tensor_parallel: int,
    kv_transfer: dict[str, Any] | None,
    num_blocks: int | None = None,
    cache_dtype: str = "auto",
    prefix_caching: bool = True,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The fields of EngineArgs of one engine, with a forked worker for each rank where there are several.

    `model`: folder of a checkpoint, or of a config.json alone; `block_size`: None: as vLLM chooses;
    `kv_transfer`: fields of KVTransferConfig, None: no connector; `num_blocks`: of the pool, None: as memory
    allows; `more`: further fields, which win.
    """
    from vllm.config import KVTransferConfig

    from pytest_kvconform.rigs.vllm_setup.forked_executor import ForkedExecutor

    arguments: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "kv_cache_dtype": cache_dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_seqs,
        "max_num_batched_tokens": max_batched_tokens,
        "enforce_eager": True,
        "tensor_parallel_size": tensor_parallel,
        "distributed_executor_backend": "uni" if tensor_parallel == 1 else ForkedExecutor,
        "num_gpu_blocks_override": num_blocks,
        "enable_prefix_caching": prefix_caching,
        "async_scheduling": False,
        "disable_log_stats": True,
        "block_size": block_size,
        "seed": 0,
        "kv_transfer_config": KVTransferConfig(**kv_transfer) if kv_transfer else None,
    }
    return arguments | (more or {})


def geometry_config(
    geometry: Geometry,
    *,
    block_size: int,
    kernel_block: int,
    conv_layout: str,
    cache_dtype: str,
    tensor_parallel: int,
    more: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """The VllmConfig of an engine without a model, whose KV cache has the geometry of a real one.

    `block_size`: tokens, as a user asks for them; `kernel_block`: tokens of a block of the attention kernels;
    `conv_layout`: "DS" or "SD", of convolution states; `more`: further fields of EngineArgs, which win;
    `arguments`: further parameters of `engine_config`.
    The caller has called `overrides.keep_configured_limits`.
    """
    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = conv_layout
    folder = _folder_of(geometry)
    drafts = {"model": str(folder / DRAFT), **geometry.speculation} if geometry.speculation else None
    config = engine_config(
        str(folder),
        dtype=geometry.dtype,
        block_size=block_size,
        cache_dtype=cache_dtype,
        tensor_parallel=tensor_parallel,
        more={"speculative_config": drafts} | (more or {}),
        **arguments,
    )
    config.cache_config.block_size = block_size_of(
        geometry, tensor_parallel, block_size, cache_dtype, kernel_block=kernel_block
    )
    return config


def _folder_of(geometry: Geometry) -> Path:
    """A folder with the model's config.json within the run's folder, or within that of engines on two nodes,
    and in it a folder with the config.json of the draft, if there is one.

    P and D have folders of one name, since connectors compare names of models.
    """
    folder = Path(os.environ.get(FOLDER_OF_NODES) or tempfile.gettempdir()) / f"geometry-{geometry.id}"
    for place, config in ((folder, geometry.config), (folder / DRAFT, geometry.draft_config)):
        if config is not None:
            place.mkdir(exist_ok=True)
            written = place / f"{os.getpid()}.json"
            written.write_text(json.dumps(config))
            written.replace(place / "config.json")  # another engine may be reading it
    return folder


def kv_cache_config_of_rank(config: Any, specs: dict[str, Any]) -> Any:
    """The KVCacheConfig of an engine of one rank.

    `specs`: layer -> KVCacheSpec. The configuration gives the blocks.
    """
    return get_kv_cache_configs(config, [specs], [PLENTY])[0]


def kv_cache_config_of_scheduler(config: Any, specs: dict[str, Any], ranks: int) -> Any:
    """The scheduler's KVCacheConfig for ranks with equal layers. The configuration gives the blocks."""
    configs = get_kv_cache_configs(config, [dict(specs) for _ in range(ranks)], [PLENTY] * ranks)
    return generate_scheduler_kv_cache_config(configs)
