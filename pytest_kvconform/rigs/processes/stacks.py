"""Read Python stacks from the log of a process that died, hung or printed an exception."""

from __future__ import annotations

import re
from collections.abc import Collection

Frame = tuple[str, int, str]  # file, line, function
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\w+)')
_START = re.compile(r"\(most recent call (first|last)\)")  # "first": faulthandler; "last": traceback


def most_telling_stack(text: str, functions: Collection[str]) -> tuple[Frame, ...]:
    """The last stack in a log that passes through one of `functions`; without one, the last stack.

    Innermost frame first.

    faulthandler writes a stack on a deadly signal and on SIGUSR1. Python prints an exception that nobody
    catches with its stack.
    """
    found: list[tuple[Frame, ...]] = []
    parts = _START.split(text)
    for order, frames in zip(parts[1::2], parts[2::2], strict=True):
        stack = tuple((m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(frames))
        found.append(stack if order == "first" else stack[::-1])
    return next(
        (stack for stack in reversed(found) if any(name in functions for *_, name in stack)),
        found[-1] if found else (),
    )
