"""Hides features of the CPU from vLLM:

Python imports this module in every process that has its folder on PYTHONPATH.

HIDDEN_CPU_FEATURES lists what `torch.cpu._is_FEATURE_supported` is to deny, for example
"amx_tile,avx512_bf16". vLLM chooses its library of kernels and its code paths by these functions
(vllm/platforms/cpu.py).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HIDDEN = [name for name in os.environ.get("HIDDEN_CPU_FEATURES", "").split(",") if name]


class HideFeatures(importlib.abc.MetaPathFinder):
    """Finds torch.cpu as Python would, and replaces its functions once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(fullname)
        assert found is not None
        assert found.loader is not None
        loader: Any = found.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for feature in HIDDEN:
                assert hasattr(module, f"_is_{feature}_supported")
                setattr(module, f"_is_{feature}_supported", lambda: False)

        loader.exec_module = exec_module
        return found


if HIDDEN:
    sys.meta_path.insert(0, HideFeatures())
