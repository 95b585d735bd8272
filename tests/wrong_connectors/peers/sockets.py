"""Wrong ends of connections and of loads, of a connector that reads over TCP."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tests.right_connectors.sockets import Load, Orders, TcpPull

__all__ = ["Cancels", "CancelsHalf", "DiesOfAReset", "LooksUpFirst", "TakesResetForTheEnd", "TcpPull"]

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


@dataclass
class Cancelling(Orders):
    cancels: set[str] = field(default_factory=set)  # requests of D that were aborted while they load


class Cancels(TcpPull):
    """Right: D drops transfers of an aborted request that have not begun. Then the load is over."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.loading, self.cancels = set[str](), set[str]()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.loading |= {load.request for load in self.orders.loads}

    def update_connector_output(self, connector_output: Any) -> None:
        self.loading -= connector_output.finished_recving or set()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.cancels |= {request.request_id} & self.loading
        return super().request_finished_all_groups(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Cancelling:
        orders, cancels = super().build_connector_meta(scheduler_output), self.cancels
        self.cancels = set()
        return Cancelling(orders.loads, orders.sends, orders.releases, cancels)

    def begin(self, load: Load) -> None:
        known = len(self.delayed)
        super().begin(load)
        for _, job in self.delayed[known:]:
            job.load = load

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        cancels = self._get_connector_metadata().cancels
        for job in [job for _, job in self.delayed if job.load.request in cancels]:
            self.cancel(job)

    def cancel(self, job: Any) -> None:
        self.delayed = [one for one in self.delayed if one[1] is not job]
        self.ends.put((job.load, True))


class CancelsHalf(Cancels):
    """Reports the load as over, and begins its transfers later."""

    def cancel(self, job: Any) -> None:
        job.load.dropped = True  # P is not told, and goes on serving
        self.ends.put((job.load, True))
