"""Names that the pytest processes of a run note for each other, each as an empty file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


class Marks:
    """A set of names, or of what `str` names, that all pytest processes of a run share.

    With pytest-xdist, the cases of a connector run in several processes. What one has found out, the others
    need not wait for. A name that cannot be written is lost, and costs only time.
    """

    def __init__(self, folder: Path):
        """`folder`: made with the first name."""
        self._folder = folder

    def add(self, name: object) -> None:
        """Add a name."""
        with contextlib.suppress(OSError):  # a disk is full, or the run has ended and its folder is gone
            self._folder.mkdir(exist_ok=True)
            (self._folder / str(name)).touch()

    def __contains__(self, name: object) -> bool:
        return (self._folder / str(name)).exists()

    def __iter__(self) -> Iterator[str]:
        return iter(os.listdir(self._folder) if self._folder.exists() else ())
