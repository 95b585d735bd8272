"""Make `import vllm` work beside packages that were built for another torch.

PyPI's torchvision, torchaudio and torchcodec are built for CUDA torch. Beside a CPU torch their native parts
do not load, and vLLM's import chain (through transformers) fails with them although no text model needs any
of their kernels. A build that matches, such as those of PyTorch's own CPU index, loads and is left alone:
each package is tried.
"""

from __future__ import annotations

import importlib
import sys

# An import of these fails cleanly, and transformers and vLLM take them for not installed.
OPTIONAL = ("torchaudio", "torchcodec")

# torchvision must import (Qwen3.5's module imports its vision processors); what fails is the registration of
# fake kernels for two operators that its native part would have defined.
# https://github.com/pytorch/vision/blob/main/torchvision/_meta_registrations.py
OPERATORS = ("nms", "qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def mend_imports() -> list[str]:
    """Import each optional package once and replace what does not load.

    Returns one sentence per replaced package.
    """
    replaced = []
    for name in OPTIONAL:
        error = _import_error(name)
        if error:
            _forget(name)
            sys.modules[name] = None  # type: ignore[assignment]  # the documented way to make an import fail
            replaced.append(
                f"{name} does not load beside this torch and is treated as not installed ({error})"
            )
    error = _import_error("torchvision")
    if error:
        _forget("torchvision")
        import torch

        for operator in OPERATORS:
            torch.library.define(f"torchvision::{operator}", SIGNATURE)
        importlib.import_module("torchvision")
        replaced.append(
            "torchvision's native part does not load beside this torch; "
            f"its operators are declared without kernels ({error})"
        )
    return replaced


def _import_error(name: str) -> str:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return "" if error.name == name else _first_line(error)
    # A native library that does not load raises OSError or RuntimeError, depending on its version.
    except Exception as error:
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def _forget(name: str) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]
