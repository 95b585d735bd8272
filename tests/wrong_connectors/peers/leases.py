"""Wrong leases and heartbeats."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from reference_connector import ReferenceConnector
from reference_connector.messages import Leases, decode, encode

from .right import Right, TrustsLeases


class LooksBefore(Right):
    """Asks whether a lease is over when it begins to read, and not when it has read."""

    looks_at_leases = False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.lease.note(self._connector_metadata, self.connector_worker._remote_agents)
        over = self.__dict__.setdefault("over", set())
        over |= {name for name in self._connector_metadata.reqs_to_recv if self.lease.is_over(name)}
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self.over & results.finished_recving
        return results


class CountsTimeAlone(Right):
    """D knows when a lease ends by the clock, and not that P frees the blocks when D has read them."""

    def prepare_worker(self, worker: Any) -> None:
        self.lease.note_read = lambda theirs: None  # type: ignore[method-assign]


class NeverExpires(Right):
    """P waits for ever for a reader."""

    def prepare_worker(self, worker: Any) -> None:
        worker._reap_expired_send_leases = lambda done_sending: None


class ExpiresEarly(Right):
    """P's lease is about a third shorter than configured."""

    def prepare_scheduler(self, scheduler: Any, lease_s: float) -> None:
        scheduler._kv_lease_duration = 0.65 * lease_s
        super().prepare_scheduler(scheduler, 0.65 * lease_s)


class HearsLateReaders(TrustsLeases):
    """P reports a request whose reader comes after the lease once more."""

    def prepare_worker(self, worker: Any) -> None:
        agent = worker.nixl_wrapper
        notifs, known = agent.get_new_notifs, worker._get_new_notifs
        late = set[str]()

        def get_new_notifs() -> Any:
            found = notifs()
            for message in (
                m.decode() for messages in found.values() for m in messages if not m.startswith(b"HB:")
            ):
                name = message.rpartition(":")[0]
                if name not in worker._reqs_to_send and name not in worker._reqs_to_process:
                    late.add(name)
            return found

        def get_new() -> set[str]:
            out = known() | late
            late.clear()
            return out

        agent.get_new_notifs, worker._get_new_notifs = get_new_notifs, get_new


class NoHeartbeats(Right):
    """D says nothing while a request waits."""

    def prepare_worker(self, worker: Any) -> None:
        worker._send_heartbeats = lambda metadata: None


class CutsAtCommas(Right):
    """P takes a comma in a request id for the end of the id, where D renews leases."""

    def prepare_worker(self, worker: Any) -> None:
        del worker._handle_heartbeat


class SpeaksWhenScheduled(Right):
    """D says that a request is wanted from the moment at which it is scheduled, and not before."""

    def prepare_scheduler(self, scheduler: Any, lease_s: float) -> None:
        super().prepare_scheduler(scheduler, lease_s)
        on_new_request, allocated = scheduler.on_new_request, scheduler.update_state_after_alloc

        def update_state_after_alloc(request: Any, *args: Any) -> None:
            on_new_request(request)
            allocated(request, *args)

        scheduler.on_new_request = lambda request: None
        scheduler.update_state_after_alloc = update_state_after_alloc


class SpeaksUntilScheduled(Right):
    """D says no more that a request is wanted when its load begins."""

    def prepare_scheduler(self, scheduler: Any, lease_s: float) -> None:
        super().prepare_scheduler(scheduler, lease_s)
        allocated = scheduler.update_state_after_alloc

        def update_state_after_alloc(request: Any, *args: Any) -> None:
            scheduler._stop_heartbeat(request.request_id)
            allocated(request, *args)

        scheduler.update_state_after_alloc = update_state_after_alloc


class RenewsTooSlowly(ReferenceConnector):
    """Renews leases once a minute, whatever P's lease is."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if (half := getattr(self, "_scheduler", None)) is not None:
            half._options, hold = msgspec.structs.replace(half._options, heartbeat_interval=60.0), half.hold
            half.hold = lambda name, handoff: hold(
                name, msgspec.structs.replace(handoff, remote_lease_duration=86400.0)
            )


class ReapsInOrder(ReferenceConnector):
    """P's look at its leases ends at the first one that goes on."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        leases = self._worker._leases

        def expire() -> set[str]:
            over = []
            for number, lease in leases._given.items():
                if lease.until >= time.monotonic():
                    break
                over.append(number)
            return leases._end(over)

        leases.expire = expire


class RenewsOnRankZero(ReferenceConnector):
    """D renews leases on rank 0 of P alone, and releases them on each rank."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        peers, transport = self._worker._peers, self._worker._transport
        name_of, notify, others = peers.name, transport.notify, set[str]()

        def name(peer: Any, rank: int) -> str:
            found = name_of(peer, rank)
            others.update([found] if rank else [])
            return found

        def notify_rank(peer: str, notice: bytes) -> None:
            if peer in others:
                released = decode(notice, Leases).released
                notice = encode(Leases(released, []))
            notify(peer, notice)

        peers.name, transport.notify = name, notify_rank
