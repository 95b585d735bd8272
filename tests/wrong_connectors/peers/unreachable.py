"""Wrong behaviour when a peer cannot be reached, was restarted, or sends nonsense."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import Any

import zmq

from reference_connector import ReferenceConnector
from tests.right_connectors.answers import Half, OtherHalf

from .right import PATIENCE_S, Right, TrustsLeases

# ---- peers that cannot be reached ----


class Patient(Right):
    """Asks a peer that does not answer three times, 5 s each. However busy the machine, a tenth of this time
    counts (`rigs.processes.cores.MOST`), and that is a noticeable wait.
    """

    def prepare_worker(self, worker: Any) -> None:
        shake = worker._nixl_handshake

        def handshake(*args: Any, **kwargs: Any) -> Any:
            for _ in range(2):
                with contextlib.suppress(zmq.Again):
                    return shake(*args, **kwargs)
            return shake(*args, **kwargs)

        worker._nixl_handshake = handshake


class ReportsOneFailure(ReferenceConnector):
    """Of loads that have failed within half a second one is reported as failed, and the others as done."""

    failures: dict[str, float]  # request -> when its load failed

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results, now = super().get_transfer_results(finished_req_ids), time.monotonic()
        self.failures = getattr(self, "failures", {}) | dict.fromkeys(results.failed_recving, now)
        results.finished_recving -= self.failures.keys()
        results.failed_recving.clear()
        if self.failures and now > min(self.failures.values()) + 0.5:
            results.failed_recving.add(max(self.failures, key=lambda name: self.failures[name]))
            results.finished_recving |= self.failures.keys()
            self.failures.clear()
        return results


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
    """Begins no load while a handshake is under way, and one load in a step."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        wanted = self._connector_metadata.reqs_to_recv
        held = self.__dict__.setdefault("held", {})
        held |= wanted
        wanted.clear()
        if held and not self.connector_worker._handshake_futures:
            name = next(iter(held))
            wanted[name] = held.pop(name)
        super().start_load_kv(forward_context, **kwargs)


class OneAtATime(Patient):
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
                with contextlib.suppress(Exception):  # of a peer that is gone: the connector reports it later
                    while (
                        worker.nixl_wrapper.check_xfer_state(handle) == "PROC" and time.monotonic() < deadline
                    ):
                        time.sleep(0.001)


class GivesUpForGood(Right):
    """Never again asks a peer that did not answer once."""

    def prepare_worker(self, worker: Any) -> None:
        shake, silent = worker._nixl_handshake, set[str]()

        def handshake(host: str, port: int, tp_size: int, engine: str, *args: Any, **kwargs: Any) -> Any:
            if engine in silent:
                raise RuntimeError("this peer does not answer")
            try:
                return shake(host, port, tp_size, engine, *args, **kwargs)
            except zmq.Again:
                silent.add(engine)
                raise

        worker._nixl_handshake = handshake


class WaitsForTheGone(Right):
    """Takes a transfer whose state NIXL does not know any more for one that is under way."""

    def prepare_worker(self, worker: Any) -> None:
        agent = worker.nixl_wrapper
        known = agent.check_xfer_state

        def check_xfer_state(handle: Any) -> str:
            try:
                return known(handle)
            except Exception:
                return "PROC"

        agent.check_xfer_state = check_xfer_state


# ---- peers that were started anew ----


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


class AwayHalf(Half):
    """Computes what a host and port have for it, for some time after a load from there has failed."""

    away_s = 3.0

    def start(self) -> None:
        super().start()
        self.away: dict[tuple[str, int], float] = {}  # until when

    def on_loads_finished(self, names: set[str] | None) -> None:
        for name in self.failed & self._handoffs.keys():
            handoff = self._handoffs[name]
            self.away[handoff.remote_host, handoff.remote_port] = time.monotonic() + self.away_s
        super().on_loads_finished(names)

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        handoff = self._handoffs.get(request.request_id)
        place = (handoff.remote_host, handoff.remote_port) if handoff else ("", 0)
        if self.away.get(place, 0.0) > time.monotonic():
            return 0, False
        return super().get_num_new_matched_tokens(request, computed)


class LeavesAlone(OtherHalf):
    """No mistake: after a failed load it leaves a host and port alone for some seconds."""

    half = AwayHalf


class AwayForGoodHalf(AwayHalf):
    away_s = math.inf


class LeavesAloneForGood(OtherHalf):
    """After a failed load it never again loads from the host and port."""

    half = AwayForGoodHalf


# ---- peers with other KV ----


class BelievesAnyModel(Right):
    """Does not compare its hash with that of the peer."""

    def prepare_worker(self, worker: Any) -> None:
        worker.enforce_compat_hash = False


class ForgetsRope(Right):
    """Compares vLLM's hash, which leaves the rotary embedding out."""

    @staticmethod
    def compatibility_hash(*args: Any, **kwargs: Any) -> str:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata

        return metadata.compute_nixl_compatibility_hash(*args, **kwargs)


# ---- the side channel ----


class BelievesEveryMessage(Right):
    """Has vLLM's own listener, whose thread ends with the first message that it does not understand."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            del self.connector_scheduler._nixl_handshake_listener
