"""Scheduler of pytest-xdist that gives each cell to one worker. Imported only where xdist runs."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

from pytest_kvconform.features import cell_facts
from pytest_kvconform.plan import PREFIX, cell_of_id, load_module, module_names
from pytest_kvconform.result import Cell
from pytest_kvconform.shards import ALONE_RIGS


class CellScheduling(LoadScopeScheduling):
    """Gives all cases of a cell to one worker, so that the engines of the cell start once.

    Cases that run on the scheduler rig or on servers need no engine of the cell, and may go elsewhere.
    """

    def __init__(self, config: Any, log: Any):
        super().__init__(config, log)
        self._apart = {
            f"{PREFIX}{module}::{case.name}": case.rig
            for module in module_names()
            for case in load_module(module)[1]
            if case.rig in ALONE_RIGS
        }

    def _split_scope(self, nodeid: str) -> str:
        if not (cell := cell_of_id(nodeid)):
            return str(super()._split_scope(nodeid))
        rig = self._apart.get(nodeid.partition("[")[0], "")
        return f"{PREFIX}{rig}[{cell}]"

    def _assign_work_unit(self, node: Any) -> None:
        """Give cells of models with states to workers first.

        They have few cases, and these take long. xdist would leave them to one worker at the end.
        """
        self.workqueue.move_to_end(max(self.workqueue, key=_has_state), last=False)
        super()._assign_work_unit(node)


def _has_state(scope: str) -> bool:
    family, _, place = cell_of_id(scope).partition("-")
    return bool(family) and "state" in cell_facts(Cell(family, *place.split(".")))
