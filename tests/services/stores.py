"""A right store whose blocks lie in a service (`server.py`), and wrong ones, each with one mistake."""

from __future__ import annotations

import hashlib
import io
import json
import socket
import time
from typing import Any

import torch

from tests.right_connectors.stores import Part, WholeBlocks


class InAService(WholeBlocks):
    """Keeps each block under its key in a server, as LMCacheMPConnector and MooncakeStoreConnector."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.address = "127.0.0.1", self._kv_transfer_config.get_from_extra_config("port", 0)
        self.link: Any = None

    def ask(self, op: str, key: str, body: bytes = b"") -> bytes | None:
        """What the service answers; None: there is no such key."""
        if self.link is None:
            self.link = socket.create_connection(self.address, 10).makefile("rwb")
        self.link.write(json.dumps({"op": op, "key": key, "size": len(body)}).encode() + b"\n" + body)
        self.link.flush()
        size = json.loads(self.link.readline())["size"]
        return None if size < 0 else self.link.read(size if op == "get" else 0)

    def shutdown(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = None

    def has(self, key: str) -> bool:
        return all(self.ask("has", f"{key}.{rank}") is not None for rank in range(self.ranks))

    def reset_cache(self) -> bool | None:
        self.ask("clear", f"{self.prefix}-")
        return True

    def load(self, parts: list[Part]) -> None:
        for key, block in parts:
            if (body := self.body(f"{key}.{self.rank}")) is not None:
                for name, rows in torch.load(io.BytesIO(body)).items():
                    self.rows(self.caches[name], block).copy_(rows)

    def body(self, key: str) -> bytes | None:
        return self.ask("get", key)

    def save(self, parts: list[Part]) -> None:
        for key, block in parts:
            body = io.BytesIO()
            torch.save({name: self.rows(cache, block).clone() for name, cache in self.caches.items()}, body)
            self.ask("put", f"{key}.{self.rank}", body.getvalue())


class ForgetsTheSalt(InAService):
    """The key of a block is a hash of its tokens alone, without the request's cache_salt."""

    def keys(self, request: Any) -> list[str]:
        tokens = request.all_token_ids
        ends = range(self.size, len(tokens) + 1, self.size)
        return [f"{self.prefix}-{hashlib.sha256(repr(tokens[:end]).encode()).hexdigest()}" for end in ends]


class TrustsItsIndex(InAService):
    """Announces what its index names, whether the service still has it, and does not look at its answer."""

    def has(self, key: str) -> bool:
        return self.ask("has", f"index-{key}") is not None

    def save(self, parts: list[Part]) -> None:
        super().save(parts)
        for number, (key, _) in enumerate(parts):
            self.ask("put", f"index-{key}")
            if number % 3 == 1:  # for want of room the service drops it
                self.ask("clear", key)


class WaitsForTheLost(TrustsItsIndex):
    """Waits without a deadline for what the service has lost."""

    def body(self, key: str) -> bytes | None:
        while (found := super().body(key)) is None:
            time.sleep(0.01)
        return found
