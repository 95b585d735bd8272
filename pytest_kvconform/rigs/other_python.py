"""A second zygote, from which D is forked where P and D share no Python, as two servers do not.

Python salts the hash of a text anew in each process that starts (PYTHONHASHSEED), and forks of one process
share the salt and the addresses of objects. A connector that names models, blocks or requests by `hash` is
right only among such forks.
"""

from __future__ import annotations

from collections.abc import Callable

from model_matrix import load_geometries
from pytest_kvconform.rigs.launch import Zygote, launch_another, wait_for_zygote
from pytest_kvconform.rigs.processes.place import Place

IMPORT_S = 120.0  # to import vLLM, times --kv-timeout-scale


class OtherPython:
    """Starts the second zygote for the first cell that needs it."""

    def __init__(self, address: str, timeout_scale: float, progress: Callable[[str], None]):
        """`address`: of the first zygote. `progress`: shows the user a sentence."""
        self._address, self._limit = address, IMPORT_S * timeout_scale
        self._progress = progress
        self._zygotes: dict[str, Zygote] = {}  # by geometry

    def place(self, geometry: str) -> Place:
        """Where a D of this geometry starts. Raises Blocked or HarnessError if vLLM cannot be imported."""
        if geometry not in self._zygotes:
            self._progress("importing vLLM once more: D is no fork of the Python of P")
            architectures = load_geometries()[geometry].config["architectures"]
            self._zygotes[geometry] = launch_another(self._address, architectures)
        zygote = self._zygotes[geometry]
        wait_for_zygote(zygote.address, self._limit)
        return Place(zygote.address)

    def close(self) -> list[str]:
        """End what was started. Returns sentences about what did not end."""
        zygotes, self._zygotes = self._zygotes, {}
        return [sentence for zygote in zygotes.values() for sentence in zygote.close()]
