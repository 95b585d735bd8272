"""Read exceptions from a log. An exception in a background thread of a connector shows up there only."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.stacks import CURRENT

# What a logger may put before each line of a traceback:
# "(Worker pid=12) ERROR 11-21 05:26:27 [base_worker.py:1318] ".
_PREFIX = re.compile(r"^(?:\([^)]*\) )?(?:[A-Z]+ [\d:. -]+\[[^\]]*\] )?")
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\w+)')
_END = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Failure))(?:: (?P<message>.+))?$")
# Who logs a line, and where: "(EngineCore pid=12)", "core.py:1510".
_LOGGED = re.compile(r"^(?P<who>\([^)]*\) )?[A-Z]+ [\d:. -]+\[(?P<where>[^\]]*)\] .*", re.MULTILINE)
_START = re.compile(_LOGGED.pattern[:-2] + r"(?:EngineCore|WorkerProc) failed to start\.$", re.MULTILINE)
# faulthandler's line of a frame of the rigs. It is at the outer end of a stack, and so comes last.
_RIG = re.compile(
    r'^  File "(?:[^"]*/pytest_kvconform/rigs/[^"]*|<frozen runpy>)", line \d+ in .*\n?', re.MULTILINE
)
LOG_LINES = 12  # of a log, in a finding
SENTENCE_CHARACTERS = 240  # characters of one sentence
STACK_S, MOMENT_S = 5.0, 0.1  # that a process may take to write its stack; in which nothing more comes


def write_stack(pid: int) -> int:
    """Let a child, whose log is that of this process, write its stacks. Waits until they are in the log.

    Returns the position in the log from which they are.
    """
    position, deadline, text = os.lseek(2, 0, os.SEEK_END), Deadline(STACK_S, (pid,)), ""
    os.kill(pid, signal.SIGUSR1)
    while not deadline.over():
        time.sleep(MOMENT_S)
        before, text = text, text_since(position)
        if text == before and CURRENT in text:
            break
    return position


def text_since(position: int) -> str:
    """What was written to the log of this process since. Bytes that are no text are shown as escapes."""
    with open("/proc/self/fd/2", "rb") as log:
        log.seek(position)
        return log.read()[-60000:].decode("utf-8", "backslashreplace")


def exceptions_in(text: str) -> tuple[str, ...]:
    """Each exception once, in order: "AssertionError: sizes differ".

    An exception without a message has its place and the line of source instead:
    "AssertionError in add_agent (base.py:12): assert a == b".
    """
    found: dict[str, None] = {}
    place = source = ""
    for line in text.splitlines():
        line = _PREFIX.sub("", line)
        if frame := _FRAME.match(line):
            place, source = f" in {frame['name']} ({Path(frame['file']).name}:{frame['line']})", ""
        elif end := _END.match(line):
            name = end["type"].rpartition(".")[2]
            sentence = (
                f"{name}: {end['message']}"
                if end["message"]
                else name + place + (f": {source}" if source else "")
            )
            found[printable(sentence[:SENTENCE_CHARACTERS])] = None
            place = source = ""
        elif place and not source:
            source = line.strip()
    return tuple(found)


def reason_of_start(text: str) -> str:
    """The exception for which an engine core or a rank of vLLM did not start; "" if the log has none.

    vLLM logs it under a line of its own, with all exceptions that led to it before. A rank comes before its
    engine core, which only tells that a rank failed.
    """
    start = _START.search(text)
    if start is None:
        return ""
    logged = (_LOGGED.match(line) for line in text[start.start() :].splitlines())
    lines = [line[0] for line in logged if line and line.groups() == start.groups()]
    return next(reversed(exceptions_in("\n".join(lines))), "")


def last_lines(text: str) -> tuple[str, ...]:
    """The last lines of a log, as a finding shows them: without frames of the rigs, cut to 160 characters."""
    return tuple(printable(line)[:160] for line in _RIG.sub("", text).splitlines()[-LOG_LINES:])


def printable(line: str) -> str:
    """The line with a dot for each character that cannot be printed."""
    return "".join(c if c.isprintable() else "·" for c in line)
