"""What a worker does with functions of vLLM: process groups, the worker half, KV memory, contexts of a step.

vLLM keeps the worker half and the groups of a process in modules, and so a process has one worker. vLLM and
torch are imported inside functions only: the suite imports this module.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

BACKEND = "gloo"  # of process groups whose ranks share a device


def device_type() -> str:
    """torch's name of the device that vLLM runs on here: "cpu", "cuda" (platforms/interface.py: Platform)."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def uses_accelerator() -> bool:
    """Whether this process has taken an accelerator into use."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())


# ---- process groups ----------------------------------------------------------------------------------------


def join_process_groups(config: Any, rank: int, meeting: str, local_rank: int) -> None:
    """Join the groups of an engine's ranks, and draw the random numbers that all of them draw.

    `config`: a VllmConfig; `meeting`: address at which the ranks find each other (torch's init_method);
    `local_rank`: number of the rank's device. Source: v1/worker/gpu_worker.py: Worker.init_device.
    """
    from vllm.utils.torch_utils import set_random_seed
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    init_worker_distributed_environment(config, rank, meeting, local_rank, BACKEND)
    set_random_seed(config.model_config.seed)  # so that P and D draw the same numbers


def has_process_groups() -> bool:
    """Whether this process has tensor and pipeline parallel groups (distributed/parallel_state.py)."""
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    return bool(model_parallel_is_initialized())


def place_of_rank() -> tuple[int, int]:
    """(pipeline stage, tensor parallel rank) of this process (distributed/parallel_state.py)."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().rank_in_group, get_tp_group().rank_in_group


# ---- the worker half of the connector ----------------------------------------------------------------------


def build_worker_half(config: Any, kv_config: Any) -> None:
    """Let vLLM build the worker half of a VllmConfig's connector, for this process.

    Source: distributed/kv_transfer/kv_transfer_state.py: ensure_kv_transfer_initialized.
    """
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_initialized

    ensure_kv_transfer_initialized(config, kv_config)


def worker_half() -> Any:
    """The connector's worker half of this process (distributed/kv_transfer/kv_transfer_state.py)."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def has_worker_half() -> bool:
    """Whether this process has a worker half (distributed/kv_transfer/kv_transfer_state.py)."""
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    return bool(has_kv_transfer_group())


def shut_worker_half_down() -> None:
    """Let vLLM shut the worker half down and forget it; without one nothing happens.

    Source: distributed/kv_transfer/kv_transfer_state.py: ensure_kv_transfer_shutdown.
    """
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()


# ---- KV memory and steps -----------------------------------------------------------------------------------


def allocate_kv_caches(cache_config: Any, kv_config: Any, device: Any, kernel_blocks: list[int]) -> Any:
    """Layer name -> KV memory, views of one allocation, in the layout that vLLM has resolved.

    `kernel_blocks`: tokens of a kernel block, by KV cache group. Source: v1/worker/utils.py:
    allocate_kv_cache.
    """
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    layout = KVCacheLayout[cache_config.get_resolved_kv_cache_layout().name]
    return allocate_kv_cache(kv_config, device, layout, kernel_blocks)


def with_config(config: Any) -> AbstractContextManager[Any]:
    """The context in which vLLM finds this VllmConfig (config/vllm.py: set_current_vllm_config)."""
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(config)


def forward_context(metadata: dict[str, Any], config: Any, tokens: int = 0) -> AbstractContextManager[None]:
    """The context of a forward (forward_context.py: set_forward_context).

    `metadata`: layer -> metadata of its attention.
    `tokens`: of this step, and every data-parallel rank then computes as many; 0: the ranks are asked. For
    models with experts vLLM asks them, which a rank by itself does not have.
    """
    import torch
    from vllm.forward_context import set_forward_context

    if not tokens:
        return set_forward_context(metadata, config)
    of_ranks = torch.full((config.parallel_config.data_parallel_size,), tokens, dtype=torch.int32)
    return set_forward_context(metadata, config, tokens, of_ranks)
