"""Where the house tests look: the files of this checkout."""

from __future__ import annotations

import subprocess
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tracked_files() -> list[Path]:
    """What a commit of the working tree would hold: tracked files, and new ones that git does not ignore.

    A source distribution holds them too, and is no repository.
    """
    if (ROOT / "PKG-INFO").is_file():
        ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
        return [file for file in sorted(ROOT.rglob("*")) if file.is_file() and not _matches(file, ignored)]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def _matches(file: Path, patterns: list[str]) -> bool:
    parts = file.relative_to(ROOT).parts
    return parts == ("PKG-INFO",) or any(fnmatch(part, one) for part in parts for one in patterns)
