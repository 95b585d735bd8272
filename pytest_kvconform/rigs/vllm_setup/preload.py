"""What the zygote does once before it forks: import torch, vLLM and the rigs, and prepare vLLM.

Otherwise each engine would do it again.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from pytest_kvconform.rigs.processes.zygote import function_named
from pytest_kvconform.rigs.vllm_setup import cpu_layers, nixl_agents, overrides
from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports, without_cuda


def preload(arguments: dict[str, Any]) -> dict[str, str]:
    """Import what engines need, and override what `overrides.py` and `nixl_agents.py` list.

    Returns facts about vLLM. The order of the steps matters where a comment gives a reason.

    `arguments` has the keys

    - "architectures": model classes of engines with checkpoints
    - "geometries": model classes of engines without a model
    - "modules": names of modules of the rigs, which are imported
    - "functions": names of functions, which are called after these imports; may be left out
    - "hidden": features of the CPU that vLLM takes for missing; may be left out
    """
    mended = mend_imports()  # before vLLM is imported
    import torch

    overrides.hide_cpu_features(arguments.get("hidden", ()))  # vLLM asks as it is imported
    torch.set_num_threads(1)  # a child keeps its parent's count, whatever its environment sets
    overrides.begin_threads_of_torch_safely()
    overrides.draw_own_random_numbers()
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform

    on_cuda = current_platform.is_cuda() and current_platform.device_count() > 0
    with without_cuda() if on_cuda else contextlib.nullcontext():
        _prepare(arguments)
    if on_cuda and torch.cuda.is_initialized():
        imported = ", ".join(["vLLM", *arguments["architectures"], *arguments["geometries"]])
        raise RuntimeError(
            f"an import initialised CUDA in the process that engines are forked from: one of {imported}"
        )
    nixl_agents.find_users_of_agent_class()  # last: it looks through all modules that are loaded by now
    return {
        "vllm": vllm.__version__,
        "device": current_platform.device_type,
        "mended": "; ".join(mended),
        "kernels": overrides.kernel_library() if current_platform.is_cpu() else "",
        "connectors": " ".join(sorted(KVConnectorFactory._registry)),
    }


def _prepare(arguments: dict[str, Any]) -> None:
    """Import and override everything, see `preload`."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    architectures, geometries = arguments["architectures"], arguments["geometries"]
    _import_engine()
    if geometries:
        _import_scheduler()
    for module in arguments["modules"]:
        importlib.import_module(module)
    for function in arguments.get("functions", ()):
        function_named(function)()
    load_general_plugins()
    overrides.configure_loggers()
    overrides.keep_heap_frozen()
    overrides.broadcast_without_shared_memory()
    if geometries:
        overrides.share_gloo_devices()
    if current_platform.is_cpu():
        overrides.communicate_without_shared_memory()
        overrides.accept_prefill_of_one_token()
        overrides.leave_float32_convolutions_unpacked()
        overrides.multiply_bfloat16_in_float32()
        overrides.zero_whole_blocks()
    overrides.override_triton_kernels_once(now=bool(architectures))  # before a model class imports numba
    if architectures and current_platform.is_cpu():
        cpu_layers.use(architectures)
    for architecture in architectures:
        _register(architecture)
    if nixl_agents.preload() and current_platform.is_cpu():
        nixl_agents.without_progress_threads()
    for architecture in geometries:
        if architecture not in architectures:
            _register(architecture)


def _import_engine() -> None:
    """Import the modules of vLLM that every engine needs."""
    import vllm.engine.arg_utils
    import vllm.model_executor.layers.quantization.online.base
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.kv_connector_model_runner_mixin
    from vllm.platforms import current_platform

    import pytest_kvconform.rigs.vllm_setup.forked_executor  # noqa: F401

    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_model_runner
        import vllm.v1.worker.cpu_worker
    else:
        import vllm.v1.worker.gpu_model_runner
        import vllm.v1.worker.gpu_worker  # noqa: F401


def _import_scheduler() -> None:
    """Import and load what engines without a model and bare schedulers need besides."""
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine
    import vllm.v1.outputs
    import vllm.v1.request
    import vllm.v1.structured_output

    from model_matrix.geometries import load_geometries

    load_geometries()
    with contextlib.suppress(ImportError):
        import vllm.distributed.kv_transfer.kv_connector.v1.nixl  # noqa: F401


def _register(architecture: str) -> None:
    """Register a model class.

    vLLM inspects a class that is not registered in a subprocess, which imports vLLM (7 s).
    """
    from vllm.model_executor.models import ModelRegistry

    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
