"""Wrong ends of connections, of a connector that reads over TCP."""

from __future__ import annotations

from typing import Any

from tests.right_connectors.sockets import TcpPull

__all__ = ["DiesOfAReset", "TakesResetForTheEnd", "TcpPull"]


class DiesOfAReset(TcpPull):
    """A connection that is reset ends the thread that reads from it, and nobody reports the load."""

    def fetch(self, load: Any, layers: range) -> bool:
        try:
            return self.read(load, layers)
        except (ConnectionRefusedError, TimeoutError, EOFError):
            return False


class TakesResetForTheEnd(TcpPull):
    """Takes a connection that is reset for the end of what P has to send."""

    def fetch(self, load: Any, layers: range) -> bool:
        try:
            return self.read(load, layers)
        except ConnectionResetError:
            return True
        except (OSError, EOFError):
            return False
