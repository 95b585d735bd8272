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

DRAFT = "draft"  # folder of the draft's config.json within that of the model
LAYOUT_ALIASES = ("NHD", "HND")  # older names for two layouts
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
    geometry: Geometry, *, conv_layout: str, more: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    """The VllmConfig of an engine without a model, whose KV cache has the geometry of a real one.

    `conv_layout`: "DS" or "SD", of convolution states; `more`: further fields of EngineArgs, which win;
    `arguments`: further parameters of `engine_config`.
    The caller has called `overrides.keep_configured_limits`. vLLM raises the size of blocks of models with
    states when it has layers: Platform.update_block_size_for_backend.
    """
    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = conv_layout
    folder = _folder_of(geometry)
    drafts = dict(geometry.speculation) if geometry.speculation else None
    if drafts and geometry.draft_config:
        drafts["model"] = str(folder / DRAFT)
    return engine_config(
        str(folder),
        dtype=geometry.dtype,
        more={"speculative_config": drafts} | (more or {}),
        **arguments,
    )


def choose_block_size(config: Any) -> None:
    """Let vLLM choose the size of blocks of a VllmConfig that knows its layers, as every executor does.

    Source: platforms/interface.py: Platform.update_block_size_for_backend.
    """
    from vllm.platforms import current_platform

    current_platform.update_block_size_for_backend(config)


def block_hasher(config: Any, hash_size: int) -> Any:
    """The function that gives a request its block hashes, in an engine of a VllmConfig.

    `hash_size`: tokens that a hash stands for. Source: v1/engine/core.py: EngineCore.__init__.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    return get_request_block_hasher(hash_size, function)


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


def be_data_parallel(parallel: Any, rank: int, size: int) -> None:
    """Make a ParallelConfig that of one of several data-parallel ranks (EngineCoreProc.run_engine_core)."""
    parallel.data_parallel_size, parallel.data_parallel_rank_local = size, 0
    parallel.data_parallel_rank = parallel.data_parallel_index = rank


def layout_names() -> list[str]:
    """Names of vLLM's KV cache layouts."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return [layout.name for layout in KVCacheLayout]


def _asks_for_known_layout(config: Any) -> bool:
    """Whether vLLM knows the KV cache layout that the connector of a VllmConfig asks for, if it does."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    return get_kv_connector_cache_layout(config) in (None, *layout_names(), *LAYOUT_ALIASES)


class _Ranks:
    """Workers that vLLM's engine core asks when it initializes KV caches. They have equal layers."""

    def __init__(self, config: Any, specs: dict[str, Any], ranks: int):
        self.specs, self.ranks, self.of_ranks = specs, ranks, list[Any]()
        self.cache_config = config.cache_config

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return [dict(self.specs) for _ in range(self.ranks)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [layout_names()] * self.ranks

    def set_kv_cache_layout(self, layout: str, *_: Any) -> None:
        self.cache_config.kv_cache_layout = layout

    def determine_available_memory(self) -> list[int]:
        return [PLENTY] * self.ranks

    def initialize_from_config(self, configs: list[Any]) -> None:
        self.of_ranks = configs

    def get_simple_cpu_offload_num_blocks(self) -> int:
        """Since 0.33 workers report how many blocks they keep in host memory. Here they have no KV yet."""
        return 1

    def compile_or_warm_up_model(self) -> None:
        """Nothing is compiled."""

    def collective_rpc(self, *_: Any) -> None:
        """No worker is told that the longest request is shorter now."""


def kv_cache_configs(config: Any, specs: dict[str, Any], ranks: int) -> tuple[Any, Any]:
    """The KVCacheConfig of the scheduler and that of a rank, made by vLLM's engine core.

    `config`: the VllmConfig, which gives the number of blocks; its `cache_config` gets what the engine core
    puts there: the layout, the sizes of blocks and of hashes, the capacity. `specs`: layer -> KVCacheSpec.
    The engine core starts with no layout that it does not know; here it gets another, and the case of
    KV-LAYOUT-001 looks at what the connector asks for.
    Source: v1/engine/core.py: EngineCore._initialize_kv_caches.
    """
    import vllm.envs
    from vllm.v1.engine.core import EngineCore

    cache = config.cache_config
    if not (cache.kv_cache_layout or vllm.envs.VLLM_KV_CACHE_LAYOUT or _asks_for_known_layout(config)):
        cache.kv_cache_layout = layout_names()[0]
    core: Any = object.__new__(EngineCore)
    core.vllm_config, core.model_executor = config, _Ranks(config, specs, ranks)
    of_scheduler = core._initialize_kv_caches(config)
    if hasattr(cache, "simple_cpu_offload_num_blocks"):  # since 0.33
        # Without a report the scheduler half counts by itself, as each worker does
        # (v1/simple_kv_offload/manager.py: _derive_cpu_config).
        cache.simple_cpu_offload_num_blocks = None
    return of_scheduler, core.model_executor.of_ranks[0]


def adopt_kv_cache_config(cache_config: Any, kv_cache_config: Any) -> None:
    """Put into a worker's CacheConfig what vLLM puts there before the worker half is built: the number of
    blocks, the layout and the sizes of hashes. Source: v1/worker/gpu_worker.py: initialize_from_config.
    """
    from vllm.v1.attention.backends.utils import record_kv_cache_layout

    cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    if kv_cache_config.kv_cache_layout is not None:
        record_kv_cache_layout(cache_config, kv_cache_config.kv_cache_layout)
    for name in ("hash_block_size", "cache_hit_alignment_tokens"):
        if hasattr(kv_cache_config, name):  # since 0.32
            setattr(cache_config, name, getattr(kv_cache_config, name))
