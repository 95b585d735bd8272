"""`collapse_into_huge_pages` keeps the content of memory, and does no harm where the kernel cannot do it."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from pytest_kvconform.rigs.processes import linux


def in_huge_pages() -> int:
    """Kilobytes of this process in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


def test_collapsed_memory_keeps_its_content() -> None:
    with mmap.mmap(-1, 24 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory.write(bytes(range(256)) * (24 << 12))
        memory.madvise(mmap.MADV_HUGEPAGE)
        before = in_huge_pages()
        assert linux.collapse_into_huge_pages() >= 11
        assert in_huge_pages() - before >= 22 << 10
        assert memory[:] == bytes(range(256)) * (24 << 12)


def test_a_kernel_without_collapse_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "_COLLAPSE", 12345)
    assert linux.collapse_into_huge_pages() == 0
