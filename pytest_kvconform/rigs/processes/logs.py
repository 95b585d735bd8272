"""What a log says about exceptions that nobody raised to the harness: a connector's background thread fails, and only its log knows."""

from __future__ import annotations

import re
from pathlib import Path

# What vLLM's logger puts before each line of a traceback: "(Worker pid=12) ERROR 11-21 05:26:27 [base_worker.py:1318] ".
_PREFIX = re.compile(r"^(?:\([^)]*\) )?(?:[A-Z]+ [\d:. -]+\[[^\]]*\] )?")
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\w+)')
_END = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Failure))(?:: (?P<message>.+))?$")
LONGEST = 240  # characters of one sentence


def exceptions_in(text: str) -> tuple[str, ...]:
    """Each exception once, in order: "AssertionError: sizes differ".

    One without a message is said with its place and the line of source: "AssertionError in add_agent (base.py:12): assert a == b".
    """
    said: dict[str, None] = {}
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
            said["".join(c if c.isprintable() else "·" for c in sentence[:LONGEST])] = None
            place = source = ""
        elif place and not source:
            source = line.strip()
    return tuple(said)
