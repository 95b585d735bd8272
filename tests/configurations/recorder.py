"""A connector that writes down what vLLM hands to its two halves: `VllmConfig` and `KVCacheConfig`, as text.

It does what the reference connector does. With PLAIN in the environment it does nothing, for an engine that
has no peer and moves nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import traceback
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from reference_connector import ReferenceConnector
from tests.configurations import FOLDER, PLAIN

# Variables of the environment by which vLLM builds configurations and lays out KV caches.
VARIABLES = ("VLLM_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_CPU_KVCACHE_SPACE")
ROOM = "pytest_kvconform/"  # of the frames that are written down


def flat(value: Any, path: str = "", above: tuple[int, ...] = ()) -> dict[str, str]:
    """The fields of nested dataclasses, dicts and lists: path -> repr of what is there, and of each record
    its class. Fields that lead back to a record above them are left out.
    """
    if id(value) in above:
        return {}
    inner, found = (*above, id(value)), {}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found[f"{path}()"] = type(value).__name__
        for one in dataclasses.fields(value):
            name = f"{path}.{one.name}" if path else one.name
            found |= flat(getattr(value, one.name, "not set"), name, inner)
    elif hasattr(value, "to_diff_dict"):  # a configuration of transformers
        found[f"{path}()"] = type(value).__name__
        found |= flat(value.to_dict(), path, inner)
    elif isinstance(value, dict):
        for key, one in value.items():
            found |= flat(one, f"{path}[{key}]", inner)
    elif isinstance(value, list | tuple) and any(map(dataclasses.is_dataclass, value)):
        for index, one in enumerate(value):
            found |= flat(one, f"{path}[{index}]", inner)
    else:
        found[path] = repr(value.name if isinstance(value, enum.Enum) else value)
    return found


def record(config: Any, role: Any, kv_cache_config: Any) -> None:
    """Write a file with what a half of the connector is handed, and the frames of the rig that builds it."""
    folder = Path(os.environ[FOLDER])
    frames = [frame.f_code for frame, _ in traceback.walk_stack(None)]
    found = {
        "half": role.name,
        "built_by": [
            f"{code.co_filename.rpartition(ROOM)[2]}:{code.co_name}"
            for code in frames
            if ROOM in code.co_filename
        ],
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "config": flat(config),
        "kv_cache_config": flat(kv_cache_config),
    }
    written = folder / f"{role.name}-{os.getpid()}-{len(os.listdir(folder))}"
    written.write_text(json.dumps(found))
    written.rename(written.with_suffix(".json"))


if PLAIN in os.environ:

    class Records(KVConnectorBase_V1, SupportsHMA):
        """Writes down what it is handed."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
            record(vllm_config, role, kv_cache_config)
            super().__init__(vllm_config, role, kv_cache_config)

        @classmethod
        def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
            return ReferenceConnector.get_required_kvcache_layout(vllm_config)

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            return 0, False

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

        def build_connector_meta(self, scheduler_output: Any) -> Any: ...

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

        def wait_for_layer_load(self, layer_name: str) -> None: ...

        def save_kv_layer(
            self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
        ) -> None: ...

        def wait_for_save(self) -> None: ...

        def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
            return False, None

else:

    class Records(ReferenceConnector):  # type: ignore[no-redef]
        """Writes down what it is handed, and transfers as the reference connector."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
            record(vllm_config, role, kv_cache_config)
            super().__init__(vllm_config, role, kv_cache_config)
