"""Loads within the step that reads them: a right connector, and one that loads states too late."""

from __future__ import annotations

import functools
from typing import Any

from tests.right_connectors.designs import LayerWise

__all__ = ["LayerWise", "LoadsStatesLate"]


class LoadsStatesLate(LayerWise):
    """Begins a load when the first attention layer waits for it: layers before it have read their states."""

    _begin: Any = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        begin = functools.partial(super().start_load_kv, forward_context, **kwargs)
        if self._get_connector_metadata().orders.loads:
            self._begin = begin
        else:
            begin()

    def wait_for_layer_load(self, layer_name: str) -> None:
        if begin := self._begin:
            self._begin = None
            begin()
        super().wait_for_layer_load(layer_name)
