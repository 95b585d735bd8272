"""Python stacks: of an exception, and from the log of a process that died, hung or printed an exception."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Collection

Frame = tuple[str, int, str]  # file, line, function
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\w+)')
# of faulthandler: begins the stack of the thread that died or hangs; stands before its innermost frame
CURRENT, COLLECTS = "Current thread ", "  Garbage-collecting\n"
COLLECTING = "in garbage collection"  # a place of a process
_START = re.compile(r"\(most recent call (first|last)\)")  # "first": faulthandler; "last": traceback
# faulthandler's stack of the thread that died or hangs, and the traceback of an exit that nobody catches
_END = re.compile(
    r"^Current thread .*\(most recent call first\):\n(?P<current>(?:  .*\n?)*)"
    r"|^Traceback \(most recent call last\):\n(?P<exit>(?:  .*\n)*)(?=SystemExit|KeyboardInterrupt)",
    re.MULTILINE,
)
# the folder of vLLM's own connectors: a connector may inherit from one of them, or be one of them
OF_VLLM = os.path.join("vllm", "distributed", "kv_transfer", "kv_connector", "v1", "")
NOT_HOOKS = (f"{os.sep}vllm{os.sep}", f"{os.sep}pytest_kvconform{os.sep}")  # other functions have such names
FRAMES = "kv_frames"  # attribute of an exception from another process, whose traceback stayed there


def is_hook(frame: Frame, hooks: Collection[str]) -> bool:
    """Whether a frame is a hook of a connector. `hooks`: their names, which other functions have, too."""
    file, _, function = frame
    return function in hooks and (OF_VLLM in file or not any(part in file for part in NOT_HOOKS))


def is_of_class(frame: Frame, file: str, module: str) -> bool:
    """Whether a frame is code of the package of a class, or of its module if that is in no package.

    `file`, `module`: of the class; "": not known.
    """
    folder, name = os.path.split(file)
    in_package = "." in module or name == "__init__.py"
    return bool(file) and frame[0].startswith(os.path.join(folder, "") if in_package else file)


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


def stack_of(error: BaseException) -> tuple[Frame, ...]:
    """Frames of an exception and of every exception that it was raised from, innermost first."""
    found: list[Frame] = []
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        found += getattr(one, FRAMES, ())
        found += [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(one.__traceback__)[::-1]]
        one = one.__cause__ or one.__context__
    return tuple(found)


def stacks_of_ends(text: str) -> tuple[tuple[Frame, ...], ...]:
    """The stack of each thread that ended or hung its process, in a log.

    Other threads, which only waited meanwhile, and exceptions that somebody caught are not among them.
    """
    parts = [match["current"] or match["exit"] or "" for match in _END.finditer(text)]
    return tuple(
        tuple((m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(part)) for part in parts
    )


def last_stacks(text: str) -> tuple[Frame, ...]:
    """Frames of all threads that ended or hung their process, see `stacks_of_ends`."""
    return tuple(frame for stack in stacks_of_ends(text) for frame in stack)


def place_of_del(text: str) -> str:
    """Where the thread that ended or hung its process was, if it collected garbage or was in the `__del__` of
    an object, by the process's log; "": in neither.
    """
    if COLLECTS in text:  # also of a process with children, whose stacks follow
        return COLLECTING
    return "in an object's __del__" if any(name == "__del__" for *_, name in last_stacks(text)) else ""
