"""Import vLLM's modules in the zygote without initialising CUDA there.

A process that has initialised CUDA cannot hand it to its forks: torch raises "Cannot re-initialize CUDA in
forked subprocess" in each of them. vLLM's kernels of linear attention ask torch and Triton for the GPUs as
they are imported (vllm/third_party/flash_linear_attention/ops/utils.py), and the question initialises CUDA. So
a child of the zygote asks once, and ends. While modules are imported, torch and Triton give the answers of the
child.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

PATIENCE_S = 60.0  # for the child: CUDA is up in seconds


def ask() -> dict[str, Any]:
    """What modules ask about the GPUs as they are imported. This initialises CUDA in the calling process."""
    import torch
    from triton.runtime import driver

    devices = range(torch.cuda.device_count())
    return {
        "target": driver.active.get_current_target(),
        "names": [torch.cuda.get_device_name(i) for i in devices],
        "capabilities": [torch.cuda.get_device_capability(i) for i in devices],
        "properties": [driver.active.utils.get_device_properties(i) for i in devices],
    }


def asked_in_a_child() -> dict[str, Any]:
    """The answer of `ask` in a child process. Raises RuntimeError if the child gives none."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_send_answer, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE_S):
            raise RuntimeError(f"CUDA did not answer in {PATIENCE_S:g} s")
        answer = ours.recv()
    except EOFError:
        raise RuntimeError("a process that asked CUDA for its devices ended without an answer") from None
    finally:
        child.kill()
        child.join()
    if isinstance(answer, str):
        raise RuntimeError(f"CUDA does not name its devices: {answer}")
    return dict(answer)


def _send_answer(connection: Any) -> None:
    try:
        connection.send(ask())
    except Exception as error:  # whatever torch, Triton or the driver raise
        connection.send(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def given_to_importers() -> Iterator[None]:
    """Let torch and Triton answer as in a child process, while modules are imported.

    Raises RuntimeError if a child gets no answer.
    """
    import torch
    from triton.runtime import driver

    answers = asked_in_a_child()

    def of(kind: str) -> Any:
        return lambda device=None: answers[kind][device if isinstance(device, int) else 0]

    instead = {
        "current_device": lambda: 0,
        "get_device_name": of("names"),
        "get_device_capability": of("capabilities"),
    }
    before = {name: getattr(torch.cuda, name) for name in instead}
    for name, answer in instead.items():
        setattr(torch.cuda, name, answer)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: answers["target"],
            utils=SimpleNamespace(get_device_properties=of("properties")),
        )
    )
    try:
        yield
    finally:
        driver.set_active(None)  # the next use makes Triton's own
        for name, function in before.items():
            setattr(torch.cuda, name, function)
