"""Wrong ends of connections, of a connector that reads over TCP."""

from __future__ import annotations

import time
from typing import Any

from tests.right_connectors.sockets import TcpPull

__all__ = ["DiesOfAReset", "LooksUpFirst", "TakesResetForTheEnd", "TcpPull"]

LOOKUP_S = 0.6  # in which D does not know yet how much it can load


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


class LooksUpFirst(TakesResetForTheEnd):
    """Begins each load only when a lookup has taken its time, as vLLM's Mooncake store does."""

    asked: dict[str, float]

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self.asked = {**getattr(self, "asked", {}), request.request_id: time.monotonic()}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        wanted = request.request_id in self.wanted
        if wanted and time.monotonic() < self.asked[request.request_id] + LOOKUP_S:
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)
