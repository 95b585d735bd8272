"""Let vLLM and its model classes be imported: beside packages for another torch, and without CUDA.

PyPI's torchvision, torchaudio and torchcodec are built for CUDA torch. Beside a CPU torch their native parts
do not load, and vLLM's import chain (through transformers) fails with them although no text model needs any
of their kernels. A build that matches, such as those of PyTorch's own CPU index, loads and is left alone:
each package is tried.

A process that has initialised CUDA cannot hand it to its forks: torch raises "Cannot re-initialize CUDA in
forked subprocess" in each of them. vLLM's kernels of linear attention ask torch and Triton for the GPUs as
they are imported (vllm/third_party/flash_linear_attention/ops/utils.py), and the question initialises CUDA.
So a child of the zygote asks once, and ends. While modules are imported, torch and Triton give the answers of
the child.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from pytest_kvconform.rigs.processes.cores import Deadline

# An import of these fails cleanly, and transformers and vLLM take them for not installed.
OPTIONAL = ("torchaudio", "torchcodec")

# torchvision must import (Qwen3.5's module imports its vision processors); what fails is the registration of
# fake kernels for two operators that its native part would have defined.
# https://github.com/pytorch/vision/blob/main/torchvision/_meta_registrations.py
OPERATORS = ("nms", "qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

PATIENCE_S = 60.0  # for the child: CUDA is up in seconds


@functools.cache
def mend_imports() -> tuple[str, ...]:
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
    return tuple(replaced)


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


def ask_cuda() -> dict[str, Any]:
    """What modules ask about the GPUs as they are imported. This initialises CUDA in the calling process."""
    import torch

    devices, triton = range(torch.cuda.device_count()), _triton_driver()
    return {
        "get_device_name": [torch.cuda.get_device_name(i) for i in devices],
        "get_device_capability": [torch.cuda.get_device_capability(i) for i in devices],
        "target": triton and triton.active.get_current_target(),
        "properties": triton and [triton.active.utils.get_device_properties(i) for i in devices],
    }


def cuda_asked_in_a_child() -> dict[str, Any]:
    """The answer of `ask_cuda` in a child process. Raises RuntimeError if the child gives none."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_send_answer, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    deadline = Deadline(PATIENCE_S, (child.pid or 0,))
    try:
        while not ours.poll(0.1):
            if deadline.over():
                raise RuntimeError(f"CUDA did not answer in {deadline.passed():.0f} s")
        answer = ours.recv()
    except EOFError:
        raise RuntimeError("a process that asked CUDA for its devices ended without an answer") from None
    finally:
        child.kill()
        child.join()
    if isinstance(answer, str):
        raise RuntimeError(f"CUDA does not name its devices: {answer}")
    return dict(answer)


def _triton_driver() -> Any:
    """Triton's record of drivers; None where Triton is not installed."""
    try:
        return importlib.import_module("triton.runtime").driver
    except ImportError:
        return None


def _send_answer(connection: Any) -> None:
    try:
        connection.send(ask_cuda())
    except Exception as error:  # whatever torch, Triton or the driver raise
        connection.send(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Import modules while torch and Triton give the answers of a child process.

    Raises RuntimeError if the child gets no answer.
    """
    import torch

    triton, answers = _triton_driver(), cuda_asked_in_a_child()

    def of(question: str) -> Any:
        def answer(device: Any = None) -> Any:
            index = getattr(device, "index", device)  # of torch.device
            return answers[question][index if isinstance(index, int) else 0]

        return answer

    instead = {name: of(name) for name in ("get_device_name", "get_device_capability")}
    instead["current_device"] = lambda: 0
    before = {name: getattr(torch.cuda, name) for name in instead}
    for name, answer in instead.items():
        setattr(torch.cuda, name, answer)
    if triton:
        triton.set_active(
            SimpleNamespace(
                get_current_target=lambda: answers["target"],
                utils=SimpleNamespace(get_device_properties=of("properties")),
            )
        )
    try:
        yield
    finally:
        if triton:
            triton.set_active(None)  # the next use makes Triton's own
        for name, function in before.items():
            setattr(torch.cuda, name, function)
