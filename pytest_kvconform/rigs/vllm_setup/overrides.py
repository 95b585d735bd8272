"""Every override of vLLM and of torch: each function changes one thing, for the process and its forks.

`preload.py` calls those that hold for every process of a run. `keep_configured_limits` and `release_cores`
are for the processes that need them. Overrides of NIXL are in `nixl_agents.py`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from pytest_kvconform.rigs.processes.linux import tasks

_unfreeze = gc.unfreeze
_CORES = os.sched_getaffinity(0)  # at import: before any connector can narrow it


def configure_loggers() -> None:
    """Configure vLLM's loggers now, once instead of in each engine.

    That touches every logger there is: 0.4 s.
    """
    from vllm.config import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())


def begin_threads_of_torch_safely() -> None:
    """Let each process that is forked from now on make torch's pool of threads before its threads need it.

    A fork leaves a pool that cannot be used, and the first work of torch in a new thread replaces it. No lock
    is held: of two threads that begin at once, one may fail with "Invalid thread pool!"
    (aten/src/ATen/ParallelOpenMP.cpp). A connector that copies in threads would be blamed.
    """
    import torch

    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


def draw_own_random_numbers() -> None:
    """Let each process that is forked from now on seed NumPy's random numbers anew.

    Python's `random` does so by itself. vLLM's workers seed both again (`set_random_seed`). Where a scheduler
    half has a process of its own, P and D draw different numbers, and a connector may use them for names.
    """
    os.register_at_fork(after_in_child=np.random.seed)


def keep_heap_frozen() -> None:
    """Make `gc.unfreeze` do nothing.

    vLLM's worker calls it at shutdown and then walks the whole inherited heap (1 s); its process ends right
    after.
    """
    gc.unfreeze = lambda: None


def keep_heap_collectable() -> None:
    """Make `gc.freeze` do nothing: what this process makes can be collected without the inherited heap."""
    gc.freeze = lambda: None


def unfreeze_heap() -> None:
    """Unfreeze in spite of that, where the end of an object has to be seen."""
    _unfreeze()


def broadcast_without_shared_memory() -> None:
    """Let groups of ranks broadcast through torch.distributed, which is vLLM's own fallback.

    vLLM's broadcaster is a file of 25 MB in /dev/shm that stays there when a worker is killed, and
    `ForkedExecutor` never uses it.
    """
    from vllm.distributed import parallel_state

    make_group = parallel_state.init_model_parallel_group
    without = {"use_message_queue_broadcaster": False}
    parallel_state.init_model_parallel_group = lambda *args, **kwargs: make_group(*args, **kwargs | without)


def communicate_without_shared_memory() -> None:
    """Let ranks on CPU communicate through torch.distributed.

    It is vLLM's own fallback for ranks that share no memory.

    vLLM's shared memory spins, which is slow when there are more ranks than cores, and stays in /dev/shm when
    a worker is killed.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def communicate_without_devices() -> None:
    """Let ranks that compute nothing have process groups alone, and no communicator for their GPU.

    NCCL refuses two ranks on one GPU, and the other ranks wait for the refused one.
    """
    from vllm.platforms import Platform, current_platform

    type(current_platform).get_device_communicator_cls = Platform.get_device_communicator_cls


def accept_prefill_of_one_token() -> None:
    """Let vLLM's CPU kernel for the convolution of Gated DeltaNet take a prefill of one token of any strides.

    On CPUs with AVX512-BF16 the kernel asks for rows whose stride is their width. One row that was cut out of
    a wider projection keeps the wider stride, because `Tensor.contiguous` takes every single row for
    contiguous, and the kernel raises "expect x to be transposed" (docs/findings.md).
    """
    from vllm import _custom_ops

    kernel = _custom_ops.causal_conv1d_fwd_cpu

    def causal_conv1d_fwd_cpu(x: Any, *args: Any, **kwargs: Any) -> Any:
        one_token = x.shape[1] == 1  # x is [channel, token]
        return kernel(x.as_strided(x.shape, (1, x.shape[0])) if one_token else x, *args, **kwargs)

    _custom_ops.causal_conv1d_fwd_cpu = causal_conv1d_fwd_cpu


def leave_float32_convolutions_unpacked() -> None:
    """Let a model with a convolution in float32, such as Kimi Linear's, start on vLLM 0.31.

    On CPUs with AVX512-BF16 that version packs the weights of every convolution for a kernel of bfloat16, and
    the packing raises for float32 (docs/findings.md). vLLM 0.32 leaves such weights as they are.
    """
    import torch
    from vllm import _custom_ops

    pack = getattr(_custom_ops, "causal_conv1d_weight_pack", None)  # vLLM asks for it, too
    if pack is None:
        return

    def causal_conv1d_weight_pack(weight: torch.Tensor) -> torch.Tensor:  # [channel, tap]
        return pack(weight) if weight.dtype == torch.bfloat16 else weight.unsqueeze(1)

    _custom_ops.causal_conv1d_weight_pack = causal_conv1d_weight_pack


def multiply_bfloat16_in_float32() -> None:
    """Let linear layers in bfloat16 multiply in float32 where oneDNN has no kernel of bfloat16 for the CPU.

    These are CPUs without AVX512. A feature that is hidden (`hide_cpu_features`) is there. Without a kernel
    `torch.nn.functional.linear` takes 70 times as long as in float32 (docs/benchmarks.md). The products are
    summed in float32 either way, and rounded to bfloat16 once.
    """
    import torch
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    if _has_bfloat16_kernels():
        return
    dispatch = utils.dispatch_cpu_unquantized_gemm

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.bfloat16:
            dispatch(layer, remove_weight)
            return
        wide = weight.detach().float()

        def multiply(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return linear(x.float(), wide, None if bias is None else bias.float()).to(x.dtype)

        layer.cpu_linear = multiply
        if remove_weight:
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def _has_bfloat16_kernels() -> bool:
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def zero_whole_blocks() -> None:
    """Let vLLM's runner for CPUs zero the blocks that the scheduler names, where kernels have smaller ones.

    vLLM takes ids of blocks for ids of kernel blocks: with 8 kernel blocks to a block it zeroes an eighth of
    block 3 for block 24, whoever owns block 3 (docs/findings.md).
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def _zero_block_ids(self: Any, block_ids: list[int]) -> None:
        context = self.compilation_config.static_forward_context
        for group in self.kv_cache_config.kv_cache_groups:
            if isinstance(group.kv_cache_spec, FullAttentionSpec):
                for cache in (context[name].kv_cache for name in group.layer_names if name in context):
                    parts = group.kv_cache_spec.block_size // cache.shape[-2]
                    for block in block_ids:
                        cache[block * parts : (block + 1) * parts].zero_()

    CPUModelRunner._zero_block_ids = _zero_block_ids


def hide_cpu_features(names: Iterable[str]) -> None:
    """Let vLLM take features of the CPU for missing: it chooses its kernels by these functions of torch."""
    import torch

    for name in names:
        asked = f"_is_{name}_supported"
        getattr(torch.cpu, asked)  # raises AttributeError where torch has renamed it
        setattr(torch.cpu, asked, lambda: False)


def kernel_library() -> str:
    """The library of kernels for CPUs that vLLM has loaded: "_C", "_C_AVX512" or "_C_AVX2"; "": none.

    In a build for CUDA the library "_C" has other kernels.
    """
    import torch

    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        return ""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        found = re.search(r"/vllm/(_C(?:_AVX\w+)?)\.", maps.read())
    return found[1] if found else ""


def share_gloo_devices() -> None:
    """Let the process groups of a process share one gloo device.

    Each device has a thread that wakes up every 10 ms, and vLLM makes more than ten groups in every rank:
    with a dozen ranks on two cores that is a tenth of the time.
    """
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    devices: dict[int, Any] = {}  # by process: a thread does not survive a fork

    class SharedDevice(ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any):
            options = ProcessGroupGloo._Options()
            if os.getpid() not in devices:
                devices[os.getpid()] = ProcessGroupGloo.create_default_device()
            options._devices, options._threads, options._timeout = [devices[os.getpid()]], 2, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDevice


def override_triton_kernels_once(now: bool) -> None:
    """Let workers skip `register_triton_kernel_overrides`, which looks through every module: 0.8 s.

    `now`: call it here instead, for workers that run kernels. It must come before numba is imported, whose
    objects break that look through every module.
    """
    from vllm.platforms import current_platform

    if now:
        current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = lambda self: None


def keep_configured_limits(everywhere: bool = False) -> None:
    """Keep the block size, prefix caching and chunked prefill as configured.

    On CPU vLLM changes them for models with latent attention, whose kernels can do without (docs/findings.md;
    `cpu_layers` for Kimi Linear). `everywhere`: also on GPUs, for engines without a model, which run no
    kernel.
    """
    from vllm.platforms import current_platform

    if not (everywhere or current_platform.is_cpu()):
        return
    kind = type(current_platform)
    update = kind.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        before = (
            cache.block_size,
            cache.enable_prefix_caching,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
        )
        update(vllm_config)
        (
            cache.block_size,
            cache.enable_prefix_caching,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
        ) = before

    kind.check_and_update_config = staticmethod(check_and_update_config)


def reason_not_to_speculate(device: str) -> str:
    """Why a family with a draft model cannot run on a device of this machine; "": it can."""
    if device != "cpu" or platform.machine().lower() in ("x86_64", "amd64"):
        return ""
    return (
        f"the CPU is {platform.machine()}: latent attention and KV heads share blocks of 16 tokens in a "
        "family with a draft model, and of vLLM's attention kernels for CPUs those for x86 take such blocks"
    )


def arguments_on_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """Let models with latent attention, and a model with its draft, run on CPU. Returns their EngineArgs.

    On CPUs with AMX vLLM chooses AMX_MLA for latent attention, which takes no float32. CPU_MLA takes it, and
    vLLM ignores this choice for other attention. CPU_MLA has blocks of 16 tokens. CPU_ATTN declares multiples
    of 32 and on x86 runs with 16, too, so that a model and its draft can share a KV cache group although one
    of them has latent attention. A draft has a backend of its own. vLLM checks the head size of the model
    where the draft has latent attention (docs/findings.md).
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return arguments
    backend = {"attention_backend": "CPU_MLA"}
    if "speculative_config" not in arguments or reason_not_to_speculate(current_platform.device_type):
        return backend | arguments
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda spec=None: [MultipleOf(16)])
    MLACommonMetadata.__post_init__ = lambda self: None
    return backend | arguments | {"speculative_config": arguments["speculative_config"] | backend}


def release_cores(worker: Any) -> None:
    """Let every thread of this worker run on any core again.

    vLLM's NIXL worker pins the thread that builds it to the last core of its NUMA node (nixl/base_worker.py),
    so that P and D would share one core. That is a matter of speed, and the rigs are about bytes.
    """
    for task in tasks(os.getpid()):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task), _CORES)
