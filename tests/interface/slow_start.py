"""A right connector whose start takes long: it loads a library, or connects to a server."""

from __future__ import annotations

import time
from typing import Any

from tests.interface.wrong_connectors import Nothing

START_S = 2.5


class StartsSlowly(Nothing):
    """Each half takes long to be made, and longer than a case may take with --kv-timeout-scale=0.15."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        time.sleep(START_S)
