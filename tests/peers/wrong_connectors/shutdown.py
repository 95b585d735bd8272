"""Wrong ends of a D that loads from a P which does not answer."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import reference_connector.worker
from reference_connector import ReferenceConnector
from tests.right_connectors.sockets import TcpPull

__all__ = ["EndsWithItsReads", "LeavesThreads"]


class LeavesThreads(TcpPull):
    """Lets its threads end when they have read what they read. They are daemons."""

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER and self.server is None:
            for _ in self.threads:
                self.jobs.put(None)
        else:
            super().shutdown()


class EndsWithItsReads(ReferenceConnector):
    """Shuts down when the last read has ended."""

    def shutdown(self) -> None:
        reference_connector.worker.CLOSING_S = float("inf")
        super().shutdown()
