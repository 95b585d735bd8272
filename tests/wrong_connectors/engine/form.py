"""A connector that prints binary data, and two that do not inherit SupportsHMA."""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from .right import Right


class PrintsBinary(Right):
    """No mistake, but writes bytes that are no text to stdout and stderr all the time."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for stream in (1, 2):
            os.write(
                stream,
                os.urandom(4096)
                + b"\x00\xff\xfe\n\x1b[2J\x1b]0;title\x07Current thread 0x0 (most recent call first):\n",
            )
        super().start_load_kv(forward_context, **kwargs)


class NoHMA(KVConnectorBase_V1):
    """Does not inherit SupportsHMA. Everything else is passed to a NixlConnector."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.inner = NixlPullConnector(vllm_config, role, kv_cache_config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.inner.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        self.inner.wait_for_save()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.inner.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.inner.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.inner.build_connector_meta(scheduler_output)


def _passes(name: str) -> Any:
    return lambda self, *args: getattr(self.inner, name)(*args)


for _name in """bind_connector_metadata clear_connector_metadata register_kv_caches set_host_xfer_buffer_ops
                get_transfer_results get_block_ids_with_load_errors on_new_request update_connector_output
                request_finished get_handshake_metadata
                set_xfer_handshake_metadata_pp_aware get_loaded_kv_cache_group_ids shutdown""".split():
    setattr(NoHMA, _name, _passes(_name))


class LoadsTheWindow(NoHMA):
    """Loads the last two blocks alone. Without SupportsHMA all layers are in one group, also those without a
    window, which read the whole prompt.
    """

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for meta in self.inner._get_connector_metadata().reqs_to_recv.values():
            (ours,), (theirs,) = meta.local_block_ids, meta.remote.block_ids
            meta.local_block_ids, meta.remote.block_ids = (list(ours[-2:]),), (list(theirs[-2:]),)
        super().start_load_kv(forward_context, **kwargs)
