"""Connectors that take long to start, as one that loads a library, or to end."""

from __future__ import annotations

import threading
import time
from typing import Any

from tests.wrong_connectors.interface.halves import Nothing, is_worker

START_S = 2.5


class StartsSlowly(Nothing):
    """Each half takes long to be made, and longer than a case may take with --kv-timeout-scale=0.15."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        time.sleep(START_S)


class EndsSlowly(Nothing):
    """A thread of the worker half ends some seconds after shutdown."""

    seconds = 5.0  # more than the suite waits, and less than it waits with --kv-timeout-scale=3

    def shutdown(self) -> None:
        if is_worker(self):
            threading.Thread(target=time.sleep, args=(self.seconds,), name="drain", daemon=True).start()
        super().shutdown()


class EndsMuchLater(EndsSlowly):
    """A thread of the worker half ends two minutes after shutdown."""

    seconds = 120.0  # more than the suite waits, times cores.MOST
