"""A connector that is right on one machine alone."""

from __future__ import annotations

from typing import Any

from reference_connector import ReferenceConnector


class SaysLoopback(ReferenceConnector):
    """P tells D to connect to 127.0.0.1, which is P only where D is on the same machine."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        keeps, params = super().request_finished_all_groups(request, block_ids)
        return keeps, params and params | {"remote_host": "127.0.0.1"}
