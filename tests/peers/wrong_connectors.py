"""Connectors that do one thing wrong as peers or as ranks. Each is `Right` but for what the first sentence of its docstring says.

`Right` is vLLM's NixlConnector without what the suite finds in it: a listener that outlives nonsense, handshakes that do not wait for one
another, and a D that knows when P's lease is over. Engines import this module under its full name; the tests themselves do not.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from tests.engine.wrong_connectors import Right as Upstream

MARGIN_S = 0.5  # by which D believes a lease to end earlier
PATIENCE_S = 1.2


class Lease:
    """In D's worker half: until when P keeps what a request needs, as far as D knows."""

    def __init__(self, lease_s: float):
        self.lease_s = lease_s
        self.ends: dict[
            str, float
        ] = {}  # P's request -> end of its lease, prolonged by every heartbeat that came in time
        self.lost: set[str] = set()
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
        return theirs in self.lost or time.time() > self.ends.get(theirs, time.time()) - MARGIN_S


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
            worker = self.connector_worker
            self.lease = Lease(lease_s)
            worker._handshake_initiation_executor = ThreadPoolExecutor(self.handshakes)
            lock, add = threading.Lock(), worker.add_remote_agent

            def add_remote_agent(*args: Any, **kwargs: Any) -> Any:
                with lock:  # what may be done at once is the waiting; NIXL is asked by one thread at a time
                    return add(*args, **kwargs)

            worker.add_remote_agent = add_remote_agent
            self.prepare_worker(worker)

    def prepare_scheduler(self, scheduler: Any, lease_s: float) -> None:
        finished = scheduler.request_finished

        def request_finished(request: Any, block_ids: Any) -> Any:
            kept, params = finished(request, block_ids)
            if params and params["do_remote_prefill"]:
                params["remote_blocks_expiry_time"] = time.time() + lease_s
            return kept, params

        scheduler.request_finished = request_finished

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


# ---- peers that cannot be reached ---------------------------------------------------------------------------------------------


class NeverGivesUp(Right):
    """Asks a peer that does not answer again and again."""

    def prepare_worker(self, worker: Any) -> None:
        shake = worker._nixl_handshake

        def handshake(*args: Any, **kwargs: Any) -> Any:
            while True:
                with contextlib.suppress(zmq.Again):
                    return shake(*args, **kwargs)

        worker._nixl_handshake = handshake


class RaisesWhenUnreachable(Right):
    """Takes a peer that does not answer for impossible."""

    def prepare_worker(self, worker: Any) -> None:
        failed = worker._handle_failed_transfer

        def handle_failed(name: str, handle: Any, *args: Any, **kwargs: Any) -> Any:
            if handle is None and not worker._remote_agents.get(
                worker._recving_metadata[name].remote.engine_id
            ):
                raise RuntimeError("every peer can be reached")
            return failed(name, handle, *args, **kwargs)

        worker._handle_failed_transfer = handle_failed


class HoldsAllBack(Right):
    """Begins no load while a handshake is under way."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        worker, wanted = self.connector_worker, self._connector_metadata.reqs_to_recv
        held = self.__dict__.setdefault("held", {})
        if worker._handshake_futures:
            held |= wanted
            wanted.clear()
        else:
            wanted |= held
            held.clear()
        super().start_load_kv(forward_context, **kwargs)


class OneAtATime(Right):
    """Meets one peer after the other, as vLLM's connector does."""

    handshakes = 1


class WaitsForPeers(Right):
    """Waits in start_load_kv until every handshake has ended."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for future in list(self.connector_worker._handshake_futures.values()):
            future.exception()


class WaitsForReads(Right):
    """Waits in start_load_kv for the transfers that it has begun."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        worker, deadline = self.connector_worker, time.monotonic() + PATIENCE_S
        before = set(worker._recving_transfers)
        super().start_load_kv(forward_context, **kwargs)
        for name in worker._recving_transfers.keys() - before:
            for handle in worker._recving_transfers[name]:
                while worker.nixl_wrapper.check_xfer_state(handle) == "PROC" and time.monotonic() < deadline:
                    time.sleep(0.001)


# ---- peers that were started anew ---------------------------------------------------------------------------------------------


class Anyone(str):
    """An engine id that is no other than any."""

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


class TakesAnybody(TrustsLeases):
    """Reads from whoever answers on the port, whatever its engine id."""

    def prepare_worker(self, worker: Any) -> None:
        shake, add = worker._nixl_handshake, worker.add_remote_agent
        expected = threading.local()

        def handshake(host: str, port: int, tp_size: int, engine: str, *args: Any, **kwargs: Any) -> Any:
            expected.engine = engine
            return shake(host, port, tp_size, Anyone(engine), *args, **kwargs)

        def add_remote_agent(metadata: Any, *args: Any, **kwargs: Any) -> Any:
            metadata.engine_id = expected.engine
            return add(metadata, *args, **kwargs)

        worker._nixl_handshake, worker.add_remote_agent = handshake, add_remote_agent


class RemembersAddresses(Right):
    """Takes whoever listens on a port now for the engine that it has met there."""

    def prepare_worker(self, worker: Any) -> None:
        read, known = worker._read_blocks_for_req, dict[tuple[str, int], str]()

        def read_blocks(name: str, meta: Any) -> None:
            place = meta.remote.host, meta.remote.port
            meta.remote.engine_id = known.get(place, meta.remote.engine_id)
            if meta.remote.engine_id in worker._remote_agents:
                known[place] = meta.remote.engine_id
            read(name, meta)

        worker._read_blocks_for_req = read_blocks


# ---- leases -------------------------------------------------------------------------------------------------------------------


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


class NeverExpires(Right):
    """P waits for ever for a reader."""

    def prepare_worker(self, worker: Any) -> None:
        worker._reap_expired_send_leases = lambda done_sending: None


class ExpiresEarly(Right):
    """P's lease is a fifth shorter than configured."""

    def prepare_scheduler(self, scheduler: Any, lease_s: float) -> None:
        scheduler._kv_lease_duration = 0.8 * lease_s
        super().prepare_scheduler(scheduler, 0.8 * lease_s)


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


# ---- the side channel ---------------------------------------------------------------------------------------------------------


class BelievesEveryMessage(Right):
    """Has vLLM's own listener, whose thread ends with the first message that it does not understand."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            del self.connector_scheduler._nixl_handshake_listener


# ---- what ranks report --------------------------------------------------------------------------------------------------------


class Ranks(Right):
    """`change` sees what a rank reports before vLLM does."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        self.change(results, finished_req_ids)
        return results

    @property
    def rank(self) -> int:
        return self.connector_worker.tp_rank

    def change(self, results: Any, finished: set[str]) -> None:
        raise NotImplementedError


class RepeatsItself(Ranks):
    """Rank 1 says twice that it has received something."""

    said: frozenset[str] = frozenset()

    def change(self, results: Any, finished: set[str]) -> None:
        before, self.said = self.said, frozenset(results.finished_recving if self.rank == 1 else ())
        results.finished_recving |= before


class ForgetsToSay(Ranks):
    """Rank 1 does not say that it has received the second request."""

    count = 0

    def change(self, results: Any, finished: set[str]) -> None:
        self.count += len(results.finished_recving)
        if self.rank == 1 and self.count == 2 and results.finished_recving:
            results.finished_recving.clear()


class NamesWhatItGaveUp(Ranks):
    """Reports a request that was aborted before it was scheduled as received."""

    told: frozenset[str] = frozenset()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.told = frozenset(
            name
            for name, meta in self._connector_metadata.reqs_to_recv.items()
            if not any(meta.local_block_ids)
        )
        super().start_load_kv(forward_context, **kwargs)

    def change(self, results: Any, finished: set[str]) -> None:
        results.finished_recving |= self.told
        self.told = frozenset()


class NamesEveryEnd(Ranks):
    """P reports every request that has ended as sent."""

    def change(self, results: Any, finished: set[str]) -> None:
        if self.kv_transfer_config.kv_role == "kv_producer":
            results.finished_sending |= finished - self.connector_worker._reqs_to_send.keys()


class RepeatsFailures(Right):
    """Gives failed blocks again in every step."""

    failed: frozenset[int] = frozenset()

    def get_block_ids_with_load_errors(self) -> set[int]:
        self.failed = self.failed | super().get_block_ids_with_load_errors()
        return set(self.failed)


class NeedsForward(Right):
    """Begins every fourth load of an engine in wait_for_layer_load."""

    count, computing = 0, False

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.computing = True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        wanted = self._connector_metadata.reqs_to_recv
        held = self.__dict__.setdefault("held", {})
        self.count += len(wanted)
        if self.count == 4 and wanted:
            held |= wanted
            wanted.clear()
        if self.computing:
            wanted |= held
            held.clear()
        self.computing = False
        super().start_load_kv(forward_context, **kwargs)


class ForgetsAborted(Ranks):
    """Does not report a load whose request was aborted."""

    gone: frozenset[str] = frozenset()

    def change(self, results: Any, finished: set[str]) -> None:
        self.gone = self.gone | (finished & self.connector_worker._recving_metadata.keys())
        results.finished_recving -= self.gone


class DropsAborted(Ranks):
    """Reports a load whose request was aborted at once, and lets its transfers go on."""

    gone: frozenset[str] = frozenset()

    def change(self, results: Any, finished: set[str]) -> None:
        aborted = finished & self.connector_worker._recving_metadata.keys()
        results.finished_recving -= self.gone
        results.finished_recving |= aborted
        self.gone = self.gone | aborted
