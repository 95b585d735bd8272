"""The host memory of KV pools: a page of it is taken when it is written, not when the pool is made.

An engine writes to a small part of its pool. Some virtual machines take milliseconds for each huge page that
a process is the first to touch, and then most of the start of an engine (docs/benchmarks.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pytest_kvconform.kvspace.pools.poison import WRAP, poison_bytes

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: pages count against no limit before they are written
_FIXED = 0x10  # MAP_FIXED


def zeros(size: int) -> mmap.mmap:
    """Zeros: `size` bytes."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def poison(size: int, engine: int) -> mmap.mmap:
    """The poison of an engine: `size` bytes, as `kvspace.pools.poison` writes it.

    It repeats after WRAP bytes, so that all of it is one file, mapped again and again. Raises OSError where
    the kernel refuses.
    """
    memory = zeros(size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in range(0, size, WRAP):
        _map(start + at, min(WRAP, size - at), _file(engine))
    return memory


@contextlib.contextmanager
def pools_of(make: Callable[[int], mmap.mmap]) -> Iterator[None]:
    """Let vLLM allocate its pools on CPU, which it does by `torch.zeros` of bytes, in this memory."""
    import torch

    allocate = torch.zeros

    def allocate_pool(*size: Any, **options: Any) -> Any:
        on_cpu = torch.device(options.get("device") or "cpu").type == "cpu"
        if len(size) != 1 or not isinstance(size[0], int) or options.get("dtype") != torch.int8 or not on_cpu:
            return allocate(*size, **options)
        return torch.frombuffer(make(size[0]), dtype=torch.int8)

    torch.zeros = allocate_pool
    try:
        yield
    finally:
        torch.zeros = allocate


@functools.cache
def _file(engine: int) -> int:
    """An open file of WRAP bytes of poison. This process keeps it open."""
    file = os.memfd_create("poison")
    os.truncate(file, WRAP)
    with mmap.mmap(file, WRAP) as content:
        np.frombuffer(content, dtype=np.uint8)[:] = poison_bytes(0, WRAP, engine)
    return file


def _map(address: int, size: int, file: int) -> None:
    """Map the file there, privately: a page that is written becomes one of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    flags = mmap.MAP_PRIVATE | _FIXED | _NO_RESERVE
    if libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0) != address:
        raise OSError(ctypes.get_errno(), "mmap of poison")
