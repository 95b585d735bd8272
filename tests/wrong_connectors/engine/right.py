"""The right connector that every wrong one changes."""

from __future__ import annotations

import os
from typing import Any

# vLLM sets it for connectors that are called Nixl*; any other has to set it itself.
os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

BLOCK = 32  # tokens, of every family but qwen3_5

Groups = tuple[list[int], ...]  # block ids, one list per KV cache group


class Right(NixlPullConnector):
    """No mistake."""

    def loads(self) -> dict[str, Any]:
        """Worker half: what this step begins to load, by request."""
        return self._connector_metadata.reqs_to_recv
