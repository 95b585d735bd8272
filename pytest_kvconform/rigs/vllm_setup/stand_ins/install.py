"""Put what stands in for a GPU in its place: the copy engine, and the number of the device."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np
import torch

from pytest_kvconform.rigs.vllm_setup.stand_ins import device

# modules whose name `torch` makes streams and events
OF_STREAMS = ("simple_kv_offload.worker", "simple_kv_offload.copy_backend", "simple_kv_offload.disk_backend")
SPECS = (("cpu.spec", "CPUOffloadingSpec"), ("tiering.spec", "TieringOffloadingSpec"))


class _Instead:
    """A module or object, some of whose names are others."""

    def __init__(self, real: Any, **others: Any):
        self.__dict__.update(others, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _OnDevice(torch.Tensor):
    """The engine's KV memory, which gpu_worker.py asserts to be a GPU's."""

    is_cuda = True


def install() -> None:
    """Do it in this process and its forks, where vLLM runs on a CPU. On a GPU nothing changes."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    # mooncake_connector.py asks for it, and torch has none without an accelerator
    torch.accelerator.current_device_index = lambda: 0
    cuda = _Instead(torch.cuda, Stream=device.Stream, current_stream=device.current_stream)
    streams = _Instead(torch, Event=device.Event, cuda=cuda, zeros=_zeros)
    platform = _Instead(
        current_platform,
        Stream=device.Stream,
        current_stream=device.current_stream,
        stream=device.use_stream,
        set_device=lambda device: None,
    )
    gpu_worker: Any = importlib.import_module("vllm.v1.kv_offload.cpu.gpu_worker")
    gpu_worker.torch, gpu_worker.current_platform, gpu_worker.PIN_MEMORY = streams, platform, False
    gpu_worker.ops = _Instead(gpu_worker.ops, swap_blocks_batch=device.swap_blocks_batch)
    for module, name in SPECS:
        _without_device(getattr(importlib.import_module(f"vllm.v1.kv_offload.{module}"), name))
    others = {"current_platform": platform, "PIN_MEMORY": False, "pin_tensor": lambda tensor: None}
    for module in OF_STREAMS:
        of_simple: Any = importlib.import_module(f"vllm.v1.{module}")
        of_simple.torch = streams
        for name, ours in others.items():
            if hasattr(of_simple, name):
                setattr(of_simple, name, ours)
    memory: Any = importlib.import_module("vllm.v1.simple_kv_offload.cuda_mem_ops")
    memory._batch_memcpy = device.batch_memcpy, 1


def _zeros(shape: Any, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    """torch.zeros of bytes, which takes memory when it is written: a tier is mostly empty."""
    assert dtype == torch.int8
    return torch.from_numpy(np.zeros(shape, dtype=np.int8))


def _without_device(spec: Any) -> None:
    """Let a class of v1/kv_offload make its worker on any device: get_worker refuses all but GPUs."""
    if "get_worker" not in vars(spec):  # inherited from one that is changed, too
        return

    def get_worker(self: Any, kv_caches: Any) -> Any:
        tensors = [
            dataclasses.replace(one, tensor=one.tensor.as_subclass(_OnDevice)) for one in kv_caches.tensors
        ]
        self._worker = self._worker or self.create_worker(dataclasses.replace(kv_caches, tensors=tensors))
        return self._worker

    spec.get_worker = get_worker
