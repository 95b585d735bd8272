"""What the commands of `kvconform` print: texts of reports are data, and a reader may close early."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


def escaped(line: str) -> str:
    """Return a line in which what a terminal would obey, and not show, is escaped as in Python."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines of which parts come from reports.

    Where the reader closes early, as `head` does, the rest is not printed, and the exit code stays that of
    the answer. What the encoding of stdout lacks becomes a question mark.
    """
    encoding = sys.stdout.encoding or "ascii"
    text = "\n".join(map(escaped, lines))
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        write_no_more()


def write_no_more() -> None:
    """Let nothing fail that Python still writes to stdout when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
