"""How xdist hands out our cases. Imported only where xdist runs."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

from pytest_kvconform.plan import cell_word


class ByCell(LoadScopeScheduling):
    """One cell, one worker: its engines are started once."""

    def _split_scope(self, nodeid: str) -> str:
        return cell_word(nodeid) or str(super()._split_scope(nodeid))

    def remove_node(self, node: Any) -> str | None:
        """The case in which a worker died is not tried again: xdist would give it to worker after worker, and lose each of them."""
        for unit in self.assigned_work[node].values():
            for nodeid, completed in unit.items():
                if not completed:
                    unit[nodeid] = True
                    super().remove_node(node)
                    return nodeid
        return super().remove_node(node)

    def schedule(self) -> None:
        """A worker runs its last case only when it knows that none follows, which xdist forgets to tell one that replaces a dead one."""
        super().schedule()
        if self.collection and not self.workqueue:
            for node in self.nodes:
                node.shutdown()
