"""A byte engine whose transport follows faults: its process and the handle on it.

`faulty_nixl.install` replaces the class of NIXL's agent before the connector is built and before ranks are
forked.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from pytest_kvconform.rigs.bytes.faulty import nixl as faulty_nixl
from pytest_kvconform.rigs.bytes.faulty import ranks as rank_faults
from pytest_kvconform.rigs.bytes.faulty.messages import FaultReport, Reading
from pytest_kvconform.rigs.bytes.handle import ByteEngineHandle
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec
from pytest_kvconform.rigs.bytes.process import ByteEngineProcess
from pytest_kvconform.rigs.engine import process as engine_process
from pytest_kvconform.rigs.engine.messages import Step
from pytest_kvconform.rigs.scenario import Faults
from pytest_kvconform.rigs.tap import around

Ends = tuple[set[str], set[str]]  # requests whose sends and whose loads have ended


class FaultyEngineHandle(ByteEngineHandle):
    """A handle on one `FaultyEngineProcess`."""

    target = "pytest_kvconform.rigs.bytes.faulty.engine:serve"


class FaultyEngineProcess(ByteEngineProcess):
    """One byte engine on a transport that can fail."""

    def __init__(self, spec: ByteEngineSpec):
        self.read: list[Reading] = []
        super().__init__(spec)
        self._workers(rank_faults.watch_loads)

    def _configure(self, spec: ByteEngineSpec) -> Any:
        faulty_nixl.install()
        return super()._configure(spec)

    def readings(self) -> tuple[Reading, ...]:
        """What vLLM's scheduler has read so far in reports of its workers."""
        return tuple(self.read)

    def _watch_connector(self) -> None:
        super()._watch_connector()

        def note_reading(hook: Any, output: Any) -> None:
            told = _ended(output)
            hook(output)
            self._note_reading(told, _ended(output), set(output.failed_recving or ()))

        around(self.scheduler.connector, "update_connector_output", note_reading)

    def _note_reading(self, told: Ends, read: Ends, failed: set[str]) -> None:
        """Note what the scheduler reads in a report. `told`: before update_connector_output. For loads that
        this hook has put into the report, how far the transfers of each rank are is noted now.
        """
        sending, recving = read
        if added := recving - told[1] - failed - self.scheduler.failed_recving_kv_req_ids:
            self._workers(rank_faults.note_loads, tuple(sorted(added)))
        if any((*told, *read)):
            taken = (before - after for before, after in zip(told, read, strict=True))
            self.read.append(Reading(*(tuple(sorted(ids)) for ids in (sending, recving, *taken))))

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


def _ended(output: Any) -> Ends:
    """finished_sending and finished_recving of a KVConnectorOutput."""
    return set(output.finished_sending or ()), set(output.finished_recving or ())


def serve(connection: Connection, spec: ByteEngineSpec) -> None:
    """Run the engine in a child of the zygote, see `engine.process.serve`."""
    engine_process.serve(connection, spec, FaultyEngineProcess)
