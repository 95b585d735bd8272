"""Classes of vLLM that cases compare with, and what this process has of a vLLM worker.

The suite imports nothing of vLLM; this module imports it inside functions only.
"""

from __future__ import annotations

import importlib
from typing import Any

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_CLASSES = {
    "KVConnectorBase_V1": f"{_V1}.base",
    "KVConnectorHandshakeMetadata": f"{_V1}.base",
    "KVConnectorWorkerMetadata": f"{_V1}.base",
    "KVConnectorRole": f"{_V1}.base",
    "SupportsHMA": f"{_V1}.base",
    "KVConnectorStats": f"{_V1}.metrics",
    "KVCacheEvent": "vllm.distributed.kv_events",
    "CacheHitSource": "vllm.v1.metrics.cache_hit_source",
}


def class_named(name: str) -> Any:
    """A class of vLLM by its name. Raises KeyError for a class that no case needs."""
    return getattr(importlib.import_module(_CLASSES[name]), name)


def has_hook(name: str) -> bool:
    """Whether the interface of the installed vLLM has a hook: minors differ."""
    return any(hasattr(class_named(base), name) for base in ("KVConnectorBase_V1", "SupportsHMA"))


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
