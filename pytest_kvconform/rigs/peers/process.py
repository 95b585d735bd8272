"""The engine process of the peer rig: ranks record their worker halves; requests can be kept queued."""

from __future__ import annotations

from typing import Any

from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec
from pytest_kvconform.rigs.engine import process as engine_process
from pytest_kvconform.rigs.engine.messages import Request, Trace
from pytest_kvconform.rigs.peers import worker_recorder
from pytest_kvconform.rigs.peers.faulty_engine import FaultyEngineProcess
from pytest_kvconform.rigs.peers.messages import RankObservation


def serve(connection: Any, spec: ByteEngineSpec) -> None:
    """Run the engine in a child of the zygote, see `engine.process.serve`."""
    engine_process.serve(connection, spec, PeerEngineProcess)


class PeerEngineProcess(FaultyEngineProcess):
    """One byte engine.

    It overwrites blocks the moment they are freed, so that a late read of them is noticed.
    """

    def __init__(self, spec: ByteEngineSpec):
        self.kept_in_queue: set[str] = set()
        super().__init__(spec)
        self._workers(worker_recorder.install)
        self.reuse(True)

    def rank_observations(self) -> tuple[RankObservation, ...]:
        """What each rank's worker half was asked and reported, one record a rank."""
        return tuple(self._workers(worker_recorder.observation))

    def all_traces(self) -> dict[str, Trace]:
        """The trace of every request."""
        return {request_id: self.trace(request_id) for request_id in self.traces}

    def keep_in_queue(self, request_id: str) -> None:
        """Keep a request, which is added later, from being scheduled.

        get_num_new_matched_tokens answers None for the request. MultiConnector does the same while one of its
        connectors does not know yet.
        """
        self.kept_in_queue.add(request_id)

    def let_schedule(self, request_id: str) -> None:
        """Let the request be scheduled from now on."""
        self.kept_in_queue.discard(request_id)

    def add_and_abort(self, request: Request) -> None:
        """Add a request and abort it before a step.

        vLLM does this with a request that its API server refuses.
        """
        self.add(request)
        self.abort(request.id)

    def start_held_transfers(self) -> None:
        """Start the transfers that were held (`set_faults`)."""
        self._workers(worker_recorder.start_held_transfers)

    def _watch_connector(self) -> None:
        super()._watch_connector()
        connector = self.scheduler.connector
        matched = connector.get_num_new_matched_tokens

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
            if request.request_id in self.kept_in_queue:
                return None, False
            return matched(request, num_computed_tokens)

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens
