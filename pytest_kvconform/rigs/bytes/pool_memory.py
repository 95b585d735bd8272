"""The host memory of KV pools: a page of it is taken when it is written, not when the pool is made.

An engine writes to a small part of its pool. On some virtual machines the first touch of a huge page takes
milliseconds. Touching whole pools was most of what a start of engines took there (docs/benchmarks.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pytest_kvconform.kvspace.pools.poison import WRAP, poison_bytes
from pytest_kvconform.kvspace.pools.poison import poison as fill_with_poison

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: pages count against no limit before they are written
_FIXED = 0x10  # MAP_FIXED


def zeros(size: int) -> mmap.mmap:
    """Zeros: `size` bytes."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def poison(size: int, engine: int) -> mmap.mmap:
    """The poison of an engine: `size` bytes, as `kvspace.pools.poison` writes it.

    Poison repeats after WRAP bytes. So one file of WRAP bytes is mapped again and again, where the system has
    files in memory.
    """
    memory = zeros(size)
    if (file := poison_file(engine)) is None:
        fill_with_poison(np.frombuffer(memory, dtype=np.uint8), engine)
        return memory
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in range(0, size, WRAP):
        _map(start + at, min(WRAP, size - at), file)
    return memory


def make_poison() -> None:
    """Make the poison of P and of D. Forks of this process have it."""
    for engine in (0, 1):
        poison_file(engine)


@functools.cache
def poison_file(engine: int) -> int | None:
    """An open file in memory: WRAP bytes of the poison of an engine. This process and its forks keep it open.

    None where there is no such file: Python may have been built without os.memfd_create, and the system may
    refuse.
    """
    try:
        file = os.memfd_create("kvconform-poison")
        os.truncate(file, WRAP)
        with mmap.mmap(file, WRAP) as content:
            np.frombuffer(content, dtype=np.uint8)[:] = poison_bytes(0, WRAP, engine)
    except (AttributeError, OSError):
        return None
    return file


@contextlib.contextmanager
def pools_of(make: Callable[[int], mmap.mmap]) -> Iterator[list[int]]:
    """Let vLLM allocate its pools on CPU in this memory. It allocates them by `torch.zeros` of bytes.

    Yields the list of their sizes in bytes. Other threads get zeros meanwhile.
    """
    import torch

    allocate, thread = torch.zeros, threading.get_ident()
    made: list[int] = []

    def allocate_pool(*size: Any, **options: Any) -> Any:
        if (
            threading.get_ident() != thread
            or len(size) != 1
            or not isinstance(size[0], int)
            or not options.keys() <= {"dtype", "device"}
            or options.get("dtype") != torch.int8
            or torch.device(options.get("device") or "cpu").type != "cpu"
        ):
            return allocate(*size, **options)
        made.append(size[0])
        return torch.frombuffer(make(size[0]), dtype=torch.int8)

    torch.zeros = allocate_pool
    try:
        yield made
    finally:
        torch.zeros = allocate


def _map(address: int, size: int, file: int) -> None:
    """Map the file there, privately: a page that is written becomes one of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    flags = mmap.MAP_PRIVATE | _FIXED | _NO_RESERVE
    if libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0) != address:
        raise OSError(ctypes.get_errno(), "mmap of poison")
