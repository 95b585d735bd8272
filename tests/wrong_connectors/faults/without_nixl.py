"""Connectors that move bytes without NIXL: with a fault hook and one mistake, and without one."""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from tests.right_connectors.sockets import Load, TcpPull


class TcpForgetsFailure(TcpPull):
    """Reports a load as finished although one of its transfers failed."""

    def note_end(self, found: Any, load: Load, right: bool) -> None:
        super().note_end(found, load, True)


class TcpHidesFailure(TcpPull):
    """Never reports a load that failed."""

    def report(self, found: Any, load: Load) -> None:
        if not load.failed:
            super().report(found, load)


class TcpEndsWithTheFirst(TcpPull):
    """Reports a load as finished as soon as one of its two transfers has ended.

    A transfer takes a while, as on a machine that is busy: the case must see the mistake all the same.
    """

    def read(self, load: Load, layers: range) -> bool:
        time.sleep(0.05)
        return super().read(load, layers)

    def note_end(self, found: Any, load: Load, right: bool) -> None:
        load.open -= 1
        if load.open == 1:
            self.report(found, load)


class TcpNeverExpires(TcpPull):
    """P waits for ever for the message that D has read."""

    def start_worker(self, serves: bool) -> None:
        self.lease_s = float("inf")
        super().start_worker(serves)


class WithoutNixl(KVConnectorBase_V1, SupportsHMA):
    """Moves nothing, by no means."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
