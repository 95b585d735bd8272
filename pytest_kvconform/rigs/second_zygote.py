"""A second zygote, from which D is forked in cells of setups with two zygotes: as two servers, P and D then
come from two Python interpreters.

Python salts the hash of a text anew in each interpreter that starts, unless PYTHONHASHSEED is set. Forks of
one zygote share the salt and the addresses of objects. A connector that names models, blocks or requests by
`hash` is right among such forks alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from model_matrix import load_geometries
from pytest_kvconform.result import Blocked, HarnessError
from pytest_kvconform.rigs.launch import STAND_IN, Zygote, launch_another, wait_for_zygote
from pytest_kvconform.rigs.processes.place import Place

if TYPE_CHECKING:
    from pytest_kvconform.settings import Settings

IMPORT_S = 120.0  # to import vLLM, times --kv-timeout-scale


class SecondZygote:
    """The second zygote of one pytest process, which starts with the first D that needs it."""

    def __init__(self, address: str, settings: Settings, progress: Callable[[str], None]):
        """`address`: of the first zygote. `progress`: shows the user a sentence."""
        self._address, self._settings, self._progress = address, settings, progress
        self._zygotes: list[Zygote] = []
        self._places: dict[str, Place | Blocked | HarnessError] = {}

    def place(self, geometry: str) -> Place:
        """Where a D of this geometry starts. Raises Blocked or HarnessError, each time the same."""
        if geometry not in self._places:
            self._places[geometry] = self._start(geometry)
        if isinstance(place := self._places[geometry], Exception):
            raise place.with_traceback(None)  # which would grow with each case
        return place

    def _start(self, geometry: str) -> Place | Blocked | HarnessError:
        self._progress("importing vLLM in a second zygote, for D")
        architectures, settings = load_geometries()[geometry].config["architectures"], self._settings
        more = [STAND_IN] if settings.stand_in else []
        try:
            zygote = launch_another(self._address, architectures, settings.hide_cpu, more)
            self._zygotes.append(zygote)
            wait_for_zygote(zygote.address, IMPORT_S * settings.timeout_scale)
        except (Blocked, HarnessError) as error:
            return error
        return Place(zygote.address)

    def close(self) -> list[str]:
        """End what was started. Returns sentences about what did not end."""
        zygotes, self._zygotes = self._zygotes, []
        return [sentence for zygote in zygotes for sentence in zygote.close()]
