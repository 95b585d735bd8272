"""Where the house tests look: the files of this checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tracked_files() -> list[Path]:
    """What a commit of the working tree would hold: tracked files, and new ones that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]
