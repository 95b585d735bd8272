"""The right worker and scheduler halves that every wrong one changes."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from tests.wrong_connectors.engine import Right as Upstream

MARGIN_S = 0.5  # by which D believes a lease to end earlier
PATIENCE_S = 1.2


class Lease:
    """In D's worker half: until when P keeps what a request needs, as far as D knows: until its lease ends,
    or D has read it.
    """

    def __init__(self, lease_s: float):
        self.lease_s = lease_s
        # P's request -> end of its lease, prolonged by every heartbeat that came in time
        self.ends: dict[str, float] = {}
        self.lost: set[str] = set()  # requests of P whose blocks P has freed, or will soon
        self.wanted: dict[str, str] = {}  # D's request -> P's

    def note(self, metadata: Any, met: Any) -> None:
        """What a step begins to load, and the heartbeats that it sends."""
        now = time.time()
        for name, meta in metadata.reqs_to_recv.items():
            theirs = self.wanted[name] = meta.remote.request_id
            self._prolong(theirs, now, meta.remote.blocks_expiry_time or now)
        for engine, info in metadata.heartbeat_by_engine.items():
            for theirs in info.req_ids if engine in met else ():
                self._prolong(theirs, now, now + self.lease_s * 2 // 3)

    def _prolong(self, theirs: str, now: float, end: float) -> None:
        if now > self.ends.get(theirs, end) - MARGIN_S:
            self.lost.add(theirs)
        self.ends[theirs] = max(end, self.ends.get(theirs, end))

    def is_over(self, name: str) -> bool:
        theirs = self.wanted.pop(name, None)
        over = theirs in self.lost or time.time() > self.ends.get(theirs, time.time()) - MARGIN_S
        self.note_read(theirs)
        return over

    def note_read(self, theirs: str | None) -> None:
        """D has read this request of P: another request with the same params comes too late."""
        if theirs is not None:
            self.lost.add(theirs)


class Right(Upstream):
    """No mistake."""

    handshakes = 8  # at once
    looks_at_leases = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        lease_s = self.kv_transfer_config.get_from_extra_config("kv_lease_duration", 30)
        if self.connector_scheduler is not None:
            self.connector_scheduler._nixl_handshake_listener = self.listen
            self.prepare_scheduler(self.connector_scheduler, lease_s)
        if self.connector_worker is not None:
            from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

            base_worker.compute_nixl_compatibility_hash = self.compatibility_hash
            worker = self.connector_worker
            self.lease = Lease(lease_s)
            worker._handshake_initiation_executor = ThreadPoolExecutor(self.handshakes)
            lock, add = threading.Lock(), worker.add_remote_agent

            def add_remote_agent(*args: Any, **kwargs: Any) -> Any:
                with lock:  # what may be done at once is the waiting; NIXL is asked by one thread at a time
                    return add(*args, **kwargs)

            worker.add_remote_agent = add_remote_agent
            worker._handle_heartbeat = self.renew
            self.prepare_worker(worker)

    @staticmethod
    def compatibility_hash(vllm_config: Any, *more: Any, **named: Any) -> str:
        """vLLM's hash, which leaves the rotary embedding out, and the rotary embedding."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata

        found = metadata.compute_nixl_compatibility_hash(vllm_config, *more, **named)
        return f"{found} {vllm_config.model_config.hf_text_config.rope_parameters}"

    def prepare_scheduler(self, scheduler: Any, lease_s: float) -> None:
        finished = scheduler.request_finished

        def request_finished(request: Any, block_ids: Any) -> Any:
            kept, params = finished(request, block_ids)
            if params and params["do_remote_prefill"]:
                params["remote_blocks_expiry_time"] = time.time() + lease_s
            return kept, params

        scheduler.request_finished = request_finished

    def renew(self, payload: str) -> None:
        """Renew the leases that D names; vLLM's method cuts request ids at their commas."""
        leases = self.connector_worker._reqs_to_send
        until = time.perf_counter() + self.connector_worker._lease_extension
        leases.update({id: max(end, until) for id, end in leases.items() if id in payload})

    def prepare_worker(self, worker: Any) -> None:
        """Where mistakes are put in."""

    @staticmethod
    def listen(encoded: dict[Any, Any], ready: Any, stop: Any, host: str, port: int) -> None:
        """vLLM's listener, which ignores what it does not understand."""
        import msgspec

        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.bind(f"tcp://{host}:{port}")
        router.setsockopt(zmq.RCVTIMEO, 100)
        ready.set()
        while not stop.is_set():
            with contextlib.suppress(zmq.Again, ValueError, TypeError, KeyError, msgspec.DecodeError):
                sender, _, message = router.recv_multipart()
                _, *rank = msgspec.msgpack.decode(message)
                router.send_multipart(
                    [sender, b"", encoded[tuple(rank)], msgspec.msgpack.encode(time.perf_counter())]
                )
        context.destroy(linger=0)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.looks_at_leases:
            self.lease.note(self._connector_metadata, self.connector_worker._remote_agents)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if self.looks_at_leases:
            results.failed_recving |= {name for name in results.finished_recving if self.lease.is_over(name)}
        return results


class TrustsLeases(Right):
    """Does not ask whether a lease is over, as vLLM's connector does not."""

    looks_at_leases = False
