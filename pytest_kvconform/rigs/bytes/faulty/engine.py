"""A byte engine whose transport follows faults: its process and the handle on it.

`faulty_nixl.install` replaces the class of NIXL's agent before the connector is built and before ranks are
forked.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from pytest_kvconform.rigs.bytes.faulty import nixl as faulty_nixl
from pytest_kvconform.rigs.bytes.faulty import ranks as rank_faults
from pytest_kvconform.rigs.bytes.faulty.messages import FaultReport
from pytest_kvconform.rigs.bytes.handle import ByteEngineHandle
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec
from pytest_kvconform.rigs.bytes.process import ByteEngineProcess
from pytest_kvconform.rigs.engine import process as engine_process
from pytest_kvconform.rigs.engine.messages import Step
from pytest_kvconform.rigs.history import Call
from pytest_kvconform.rigs.scenario import Faults
from pytest_kvconform.rigs.vllm_setup.hooks import FAILED_RECVING, RECVING, UPDATE


class FaultyEngineHandle(ByteEngineHandle):
    """A handle on one `FaultyEngineProcess`."""

    target = "pytest_kvconform.rigs.bytes.faulty.engine:serve"


class FaultyEngineProcess(ByteEngineProcess):
    """One byte engine on a transport that can fail."""

    def __init__(self, spec: ByteEngineSpec):
        super().__init__(spec)
        self._workers(rank_faults.watch_loads)

    def _configure(self, spec: ByteEngineSpec) -> Any:
        faulty_nixl.install()
        return super()._configure(spec)

    def _watch_connector(self) -> None:
        super()._watch_connector()
        self.recorder.listeners[UPDATE] = self._note_added_loads

    def _note_added_loads(self, call: Call) -> None:
        """Note how far the transfers of each rank are, if the scheduler half puts loads into a report."""
        added = {*call.result[RECVING]} - {*call.arguments[RECVING], *call.result[FAILED_RECVING]}
        if added := added - self.scheduler.failed_recving_kv_req_ids:
            self._workers(rank_faults.note_loads, tuple(sorted(added)))

    def step(self, seconds: float) -> Step:
        """Run steps, see `EngineProcess.step`.

        An engine without requests still serves the transfers of its peers.
        """
        if not self.scheduler.has_requests():
            self._workers(rank_faults.progress)
        return super().step(seconds)

    def set_faults(self, faults: tuple[Faults, ...]) -> None:
        """Give the transport of every rank these faults, in place of earlier ones."""
        self._workers(rank_faults.set_faults, faults)

    def reuse_last(self, last: bool) -> None:
        """Hand out freed blocks after all others, or again as vLLM does.

        vLLM puts freed blocks that are not cached first (v1/core/block_pool.py: BlockPool.free_blocks).
        """
        queue = self.manager.block_pool.free_block_queue
        queue.prepend_n = queue.append_n if last else type(queue).prepend_n.__get__(queue)

    def fault_reports(self) -> tuple[FaultReport, ...]:
        """Return what the faults did, one record a rank."""
        return tuple(self._workers(rank_faults.fault_report))


def serve(connection: Connection, spec: ByteEngineSpec) -> None:
    """Run the engine in a child of the zygote, see `engine.process.serve`."""
    engine_process.serve(connection, spec, FaultyEngineProcess)
