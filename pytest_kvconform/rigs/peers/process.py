"""The inside of a pattern engine whose worker halves are watched and whose requests can be kept waiting."""

from __future__ import annotations

from typing import Any

from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec
from pytest_kvconform.rigs.engine import process as engine_process
from pytest_kvconform.rigs.engine.messages import Request, Trace
from pytest_kvconform.rigs.peers import worker_recorder as peer_watch
from pytest_kvconform.rigs.peers.faulty_engine import FaultyEngineProcess
from pytest_kvconform.rigs.peers.messages import Watched


def serve(connection: Any, spec: ByteEngineSpec) -> None:
    """What the zygote calls in a child: see `engine_process.serve`."""
    engine_process.serve(connection, spec, PeerEngine)


class PeerEngine(FaultyEngineProcess):
    """One pattern engine; blocks are overwritten the moment they are free, so that nobody reads them unnoticed."""

    def __init__(self, spec: ByteEngineSpec):
        self.kept_waiting: set[str] = set()
        super().__init__(spec)
        self._workers(peer_watch.install)
        self.reuse(True)

    def reports(self) -> tuple[Watched, ...]:
        """What each rank's worker half was asked and has said, one record a rank."""
        return tuple(self._workers(peer_watch.watched))

    def all_traces(self) -> dict[str, Trace]:
        """What was done with every request."""
        return {request_id: self.trace(request_id) for request_id in self.traces}

    def keep_waiting(self, request_id: str) -> None:
        """Do not schedule a request that is going to be added: as if another connector (MultiConnector) had to think about it."""
        self.kept_waiting.add(request_id)

    def go_on(self, request_id: str) -> None:
        """Schedule it."""
        self.kept_waiting.discard(request_id)

    def add_and_abort(self, request: Request) -> None:
        """Add a request and abort it before a step: what vLLM does with a request that its API server refuses."""
        self.add(request)
        self.abort(request.id)

    def let_go(self) -> None:
        """Begin the transfers that were held (`set_faults`)."""
        self._workers(peer_watch.let_go)

    def _watch_connector(self) -> None:
        super()._watch_connector()
        connector = self.scheduler.connector
        matched = connector.get_num_new_matched_tokens

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
            return (
                (None, False)
                if request.request_id in self.kept_waiting
                else matched(request, num_computed_tokens)
            )

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens
