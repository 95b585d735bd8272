"""What cases of the interface ask of vLLM itself: its classes to compare with, and what this process already has of a worker.

The suite imports nothing of vLLM, and this module imports it inside functions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pytest_kvconform.rigs.scheduler.recorder import Recorder

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Rig

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_CLASSES = {
    "KVConnectorBase_V1": f"{_V1}.base",
    "KVConnectorHandshakeMetadata": f"{_V1}.base",
    "KVConnectorWorkerMetadata": f"{_V1}.base",
    "KVConnectorRole": f"{_V1}.base",
    "KVConnectorStats": f"{_V1}.metrics",
    "KVCacheEvent": "vllm.distributed.kv_events",
    "CacheHitSource": "vllm.v1.metrics.cache_hit_source",
    "KVCacheLayout": "vllm.v1.kv_cache_layout",
}


def class_named(name: str) -> Any:
    """A class of vLLM's by its name; KeyError if it is none of those that cases need."""
    return getattr(importlib.import_module(_CLASSES[name]), name)


def connector_class(rig: Rig) -> Any:
    """The class that vLLM's factory builds both halves of."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory.get_connector_class(rig.host.vllm_config("P").kv_transfer_config)


def ask_class(rig: Rig, hook: str, *args: Any) -> Any:
    """Call a hook on the connector's class. Raises HookRaised."""
    return Recorder(rig.host.note_running_hook).call(hook, getattr(connector_class(rig), hook), *args)


def has_worker_half() -> bool:
    """Whether this process has a worker half, as vLLM sees it."""
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    return bool(has_kv_transfer_group())


def has_process_groups() -> bool:
    """Whether this process has tensor and pipeline parallel groups."""
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    return bool(model_parallel_is_initialized())


def uses_accelerator() -> bool:
    """Whether this process has taken an accelerator into use."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())
