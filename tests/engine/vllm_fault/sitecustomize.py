"""Breaks vLLM itself, without any connector:

Python imports this module in every process that has its folder on PYTHONPATH.

The file that VLLM_FAULT names holds words such as "kernel raises 33": vLLM's model runner raises when a step
prefills a prompt of 33 tokens. The place is kernel, scheduler or start; the way is raises, hangs or ends. The
file is read at each call, so that one zygote is enough for many faults.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = os.environ.get("VLLM_FAULT", "")


def fail(place: str, lengths: Sequence[int]) -> None:
    """Raise, hang or end the process if the file asks for it at this place, for one of these lengths."""
    found, way, length = (Path(FILE).read_text().split() + [""] * 3)[:3]
    if found != place or (length and int(length) not in lengths):
        return
    if way == "raises":
        raise RuntimeError("expect x to be transposed")
    while way == "hangs":
        time.sleep(1)
    os._exit(7)


def break_runner(module: ModuleType) -> None:
    runner: Any = module.GPUModelRunner
    execute, load = runner.execute_model, runner.initialize_kv_cache

    def broken_kernel(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        fail("kernel", [len(one.prompt_token_ids) for one in scheduler_output.scheduled_new_reqs])
        return execute(self, scheduler_output, *args, **kwargs)

    def broken_start(self: Any, *args: Any, **kwargs: Any) -> Any:
        fail("start", [])
        return load(self, *args, **kwargs)

    runner.execute_model, runner.initialize_kv_cache = broken_kernel, broken_start


def break_scheduler(module: ModuleType) -> None:
    scheduler: Any = module.Scheduler
    schedule = scheduler.schedule

    def broken_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        fail("scheduler", [request.num_prompt_tokens for request in self.requests.values()])
        return schedule(self, *args, **kwargs)

    scheduler.schedule = broken_schedule


BREAKS = {"vllm.v1.worker.gpu_model_runner": break_runner, "vllm.v1.core.sched.scheduler": break_scheduler}


class BreakModules(importlib.abc.MetaPathFinder):
    """Finds modules of vLLM as Python would, and breaks them once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in BREAKS:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(fullname)
        sys.meta_path.insert(0, self)
        assert found is not None
        assert found.loader is not None
        loader: Any = found.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            BREAKS[fullname](module)

        loader.exec_module = exec_module
        return found


if FILE:
    sys.meta_path.insert(0, BreakModules())
