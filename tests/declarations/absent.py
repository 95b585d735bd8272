"""Connectors that do not start: what their environment lacks, and one that makes a mistake."""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from reference_connector import ReferenceConnector

ATTEMPTS = "attempts"  # file in the folder of the run, which test_absent.py reads


def note(vllm_config: Any, role: Any) -> None:
    """Note that a half of a connector is built: a line with the engine and the half."""
    with Path(tempfile.gettempdir(), ATTEMPTS).open("a") as file:
        file.write(f"{vllm_config.kv_transfer_config.kv_role} {role.name}\n")


class NeedsAPackage(ReferenceConnector):
    """Imports its client when it is built, as vLLM's LMCacheConnectorV1."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        note(vllm_config, role)
        import no_such_kv_client  # type: ignore[import-not-found]  # noqa: F401

        super().__init__(vllm_config, role, kv_cache_config)


class NeedsAServer(ReferenceConnector):
    """Connects to its metadata server when it is built, as vLLM's MooncakeStoreConnector."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        note(vllm_config, role)
        super().__init__(vllm_config, role, kv_cache_config)
        with socket.create_connection(("127.0.0.1", 1), timeout=1):
            pass


class WaitsForAServer(ReferenceConnector):
    """Waits for the first message of its server without a deadline."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        note(vllm_config, role)
        super().__init__(vllm_config, role, kv_cache_config)
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.accept()


class OneRankWaits(ReferenceConnector):
    """Rank 1 waits for the first message of its server, and rank 0 for nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.rank:
            self.wait()

    def wait(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.accept()


class OneRankSleeps(OneRankWaits):
    """Rank 1 never comes back from its constructor, and waits for nobody."""

    def wait(self) -> None:
        time.sleep(3600)


class NeedsAConfiguration(ReferenceConnector):
    """Reads the name of its configuration from an environment variable, as vLLM's MooncakeStoreConnector."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        note(vllm_config, role)
        super().__init__(vllm_config, role, kv_cache_config)
        raise ValueError("The environment variable 'NO_SUCH_KV_CONFIG_PATH' is not set.")


class NeedsAGpu(ReferenceConnector):
    """Registers memory of a GPU when KV caches are registered, as vLLM's OffloadingConnector."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        note(vllm_config, role)
        super().__init__(vllm_config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches: Any) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")


class MakesAMistake(ReferenceConnector):
    """Reads an attribute that vLLM's configuration does not have."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        _ = vllm_config.kv_transfer_config.no_such_attribute
