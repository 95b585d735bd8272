# ruff: noqa: E402 - the environment and the imports must be mended before vLLM is imported
"""Start engines as vLLM does, by its own code, with a connector that writes down what it is handed.

    python -m tests.configurations.expected FOLDER      FOLDER has engines.json, see comparison.engine_of

vLLM's own models are built on the meta device: they have layers, and no weights. The engine core, its
configuration and its scheduler are vLLM's, and what the workers' configuration gets before a connector is
built is what `Worker.initialize_from_config` of vLLM sets. The connectors of engine number i write into the
folder i.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.configurations import FOLDER, PLAIN

os.environ |= {
    PLAIN: "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_KIMI_K3_GEMM_AR": "0",  # kernels of CUDA, imported by the model's constructor
    "VLLM_ENABLE_GEMM_RS": "0",
}

from pytest_kvconform.rigs.vllm_setup.compat import environment_without_gpu
from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports

with suppress(PackageNotFoundError):  # a build for CPUs has another name
    os.environ |= environment_without_gpu(version("vllm"))
mend_imports()

import torch
from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.engine import core
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from pytest_kvconform.rigs.vllm_setup.overrides import keep_configured_limits

PLENTY = 1 << 44  # bytes


class MetaWorker:
    """One rank whose layers have no weights."""

    def __init__(self, config: VllmConfig):
        self.vllm_config, self.cache_config = config, config.cache_config
        self.model_runner = SimpleNamespace(initialize_kv_cache=lambda *args, **kwargs: None)
        models = [config.model_config]
        if config.speculative_config and config.speculative_config.use_eagle():
            models.append(config.speculative_config.draft_model_config)
        # all that a layer's constructor asks
        parallel_state.get_tp_group().world_size = config.parallel_config.tensor_parallel_size
        with (
            set_current_vllm_config(config),
            torch.device("meta"),
            set_default_torch_dtype(config.model_config.dtype),
        ):
            layers = config.compilation_config.static_forward_context
            for model in models:
                before = set(layers)
                kind = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)[0]
                kind(vllm_config=config, prefix="")
                for name in layers.keys() - before:  # as v1/worker/gpu/spec_decode/speculator.py
                    layers[name].is_draft_layer = model is not config.model_config
        current_platform.update_block_size_for_backend(config)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        with set_current_vllm_config(self.vllm_config):
            return attn_utils.get_kv_cache_spec(self.vllm_config)

    def determine_available_memory(self) -> int:
        return PLENTY

    def get_kv_connector_handshake_metadata(self) -> None: ...

    def set_kv_cache_layout(self, *answer: Any) -> None:
        record_kv_cache_layout(self.cache_config, answer[0])

    def _maybe_get_memory_pool_context(self, tag: str) -> nullcontext[None]:
        return nullcontext()


MetaWorker.get_supported_kv_cache_layouts = WorkerBase.get_supported_kv_cache_layouts
MetaWorker.initialize_from_config = Worker.initialize_from_config


class MetaExecutor(Executor):
    """All ranks are one."""

    def _init_executor(self) -> None:
        # workers of several ranks have processes, and configurations, of their own
        several = self.parallel_config.world_size > 1
        self.worker = MetaWorker(copy.deepcopy(self.vllm_config) if several else self.vllm_config)

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        with set_current_vllm_config(self.worker.vllm_config):
            self.worker.initialize_from_config(kv_cache_configs[0])

    def compile_or_warm_up_model(self) -> None: ...

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        given = kwargs.get("args", args[1:2] and args[1]) or ()
        answer = getattr(self.worker, method)(*given) if hasattr(self.worker, method) else None
        return [answer] * self.parallel_config.world_size

    def check_health(self) -> None: ...


def start(folder: Path, engine: dict[str, Any]) -> None:
    folder.mkdir()
    arguments = engine["arguments"]
    transfer = KVTransferConfig(**arguments["kv_transfer_config"])
    with (
        patch.dict(os.environ, {FOLDER: str(folder), **engine["environment"]}),
        backends_of(**engine["stand_in"]),
    ):
        mamba_utils.get_conv_state_layout.cache_clear()
        config = EngineArgs(
            model=engine["model"], **arguments | {"kv_transfer_config": transfer}
        ).create_engine_config()
        EngineCore(config, MetaExecutor, log_stats=False)
    ensure_kv_transfer_shutdown()


@contextmanager
def backends_of(kernel: int = 0, any_multiple: bool = True) -> Iterator[None]:
    """Let attention take kernel blocks of so many tokens, or of any multiple of them, and every layout, as
    the stand-in for the backends of GPUs does. 0: the backends of this machine as they are.
    """
    sizes = [MultipleOf(kernel) if any_multiple else kernel]
    stand_in = {
        "get_supported_kernel_block_sizes": staticmethod(lambda spec=None: sizes),
        "supports_block_size": classmethod(AttentionBackend.supports_block_size.__func__),
        "supported_kv_cache_layouts": classmethod(lambda kind: tuple(KVCacheLayout)),
    }
    with ExitStack() as stack:
        for backend in (CPUAttentionBackend, CPUMLABackend, AMXMLABackend) if kernel else ():
            for name, answer in stand_in.items():
                stack.enter_context(patch.object(backend, name, answer))
        yield


def main() -> None:
    place = Path(sys.argv[1])
    engines = json.loads((place / "engines.json").read_text())
    for architecture in {name for engine in engines for name in engine["architectures"]}:
        # A class that is registered is not inspected in a subprocess, which would import vLLM once more.
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    parallel_state.init_distributed_environment(1, 0, f"file://{place}/store", 0, "gloo")
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        parallel_state.initialize_model_parallel(1)
    keep_configured_limits(everywhere=True)  # as for GPUs: limits of kernels for CPUs
    # Streams of CUDA are made by the constructor of Kimi Linear and used by its forward only.
    with (
        patch.object(torch.cuda, "Stream", lambda: None),
        patch.object(core, "enable_envs_cache", lambda: None),  # engines have environments of their own
    ):
        for number, engine in enumerate(engines):
            start(place / str(number), engine)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's group would be torn down with warnings
