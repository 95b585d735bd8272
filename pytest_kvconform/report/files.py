"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_file(path: Path, content: bytes) -> Path:
    """Write a file. A reader sees the old file or the whole new one. Raises OSError.

    A device, such as /dev/stdout, is written to and not replaced.
    """
    if path.is_char_device() or (path.parent == Path("/dev") and path.is_symlink()):
        path.write_bytes(content)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp makes the file private; a report is for others to read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
