"""Loads within the step that reads them: right connectors, and one that loads states too late."""

from __future__ import annotations

import functools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from tests.right_connectors.designs import LayerWise
from tests.right_connectors.stores import WholeBlocks

__all__ = ["DropsLastBlock", "LayerWise", "LoadsStatesLate"]


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


class DropsLastBlock(WholeBlocks):
    """No mistake: a store that leaves the last block that it has of a prompt to D, as vLLM's own prefix cache
    does for a model with a draft.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        # no hook names the requests of the oracle
        self.requests = defaultdict(lambda: SimpleNamespace(block_hashes=()))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return max(0, (tokens or 0) - self.size), asynchronous
