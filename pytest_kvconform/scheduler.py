"""How xdist hands out our cases. Imported only where xdist runs."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

from pytest_kvconform.plan import cell_word


class ByCell(LoadScopeScheduling):
    """One cell, one worker: its engines are started once."""

    def _split_scope(self, nodeid: str) -> str:
        return cell_word(nodeid) or str(super()._split_scope(nodeid))
