"""Hooks that raise, hang, or end the process."""

from __future__ import annotations

import faulthandler
import sys
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from .right import Right


class CrashesInLoad(Right):
    """Dies of a segmentation fault in start_load_kv."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.loads():
            faulthandler._sigsegv()
        super().start_load_kv(forward_context, **kwargs)


class HangsInLoad(Right):
    """start_load_kv never returns."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        while self.loads():
            print("still in start_load_kv", flush=True)
            time.sleep(1)
        super().start_load_kv(forward_context, **kwargs)


class RaisesInLoad(Right):
    """Raises in start_load_kv."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.loads():
            raise RuntimeError("the wire is cut")
        super().start_load_kv(forward_context, **kwargs)


class RaisesInShortLoad(RaisesInLoad):
    """Raises in start_load_kv for loads of one block, and for no other."""

    def loads(self) -> dict[str, Any]:
        return {name: meta for name, meta in super().loads().items() if len(meta.local_block_ids[0]) < 2}


class LeavesInLoad(Right):
    """Calls sys.exit in start_load_kv."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.loads():
            sys.exit(3)
        super().start_load_kv(forward_context, **kwargs)


class RaisesAtStart(Right):
    """Raises in its constructor."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        raise ValueError("no such fabric")


class CrashesAtStart(Right):
    """Dies of a segmentation fault when the KV caches are registered."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        faulthandler._sigsegv()
