"""Lengths of prompts, said in blocks, since the block size is the scheduler's to say: "1", "b-1", "2b+1"."""

from __future__ import annotations

import re

from pytest_kvconform.result import Cell

_LENGTH = re.compile(r"(?:(?P<times>\d*)b)?(?P<rest>[+-]?\d+)?")


def lengths(cell: Cell, matrix: str) -> list[str]:
    """One token, and both sides of the boundaries of blocks."""
    short = ["1", "2", "b-1", "b", "b+1", "2b"]
    return short if matrix == "quick" else [*short, "2b-1", "2b+1", "3b-1", "3b", "3b+1"]


def several(length: str, block: int) -> int:
    """Number of tokens: several("2b+1", 16) is 33."""
    match = _LENGTH.fullmatch(length)
    assert match is not None, length
    times = 0 if match["times"] is None else int(match["times"] or 1)
    return times * block + int(match["rest"] or 0)
