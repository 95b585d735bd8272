"""A byte engine whose transport follows faults: its process and the handle on it.

`faulty_nixl.install` replaces the class of NIXL's agent before the connector is built and before ranks are
forked.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from pytest_kvconform.rigs.bytes.handle import ByteEngineHandle
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec
from pytest_kvconform.rigs.bytes.process import ByteEngineProcess
from pytest_kvconform.rigs.engine import process as engine_process
from pytest_kvconform.rigs.engine.messages import Step
from pytest_kvconform.rigs.peers import faulty_nixl, rank_faults
from pytest_kvconform.rigs.peers.messages import FaultReport
from pytest_kvconform.rigs.scenario import Faults, faults_where_p_writes


class FaultyEngineHandle(ByteEngineHandle):
    """A handle on one `FaultyEngineProcess`."""

    target = "pytest_kvconform.rigs.peers.faulty_engine:serve"

    def set_faults(self, faults: tuple[Faults, ...]) -> None:
        """Give the transport of every rank these faults, in place of earlier ones."""
        self.call("set_faults", faults)

    def fault_reports(self) -> tuple[FaultReport, ...]:
        """Return what the faults did, one record a rank."""
        return self.call("fault_reports")


def set_faults_of_loads(
    p: FaultyEngineHandle, d: FaultyEngineHandle, faults: tuple[Faults, ...]
) -> Callable[[], None]:
    """Give both engines faults for the loads of a transfer that begins now.

    A store saves first, and faults are for its loads alone. So the function that is returned has to be called
    when everything is saved.
    """
    if p.spec.store:
        p.set_faults(())
        d.set_faults(())
        return lambda: d.set_faults(faults)
    p.set_faults(faults_where_p_writes(faults, p.ranks, d.ranks))
    d.set_faults(faults)
    return lambda: None


def reports_of(*engines: FaultyEngineHandle) -> FaultReport:
    """The fault reports of all ranks of these engines, added up."""
    return sum((report for engine in engines for report in engine.fault_reports()), FaultReport())


class FaultyEngineProcess(ByteEngineProcess):
    """One byte engine on a transport that can fail."""

    def __init__(self, spec: ByteEngineSpec):
        super().__init__(spec)
        self._workers(rank_faults.watch_loads)

    def _configure(self, spec: ByteEngineSpec) -> Any:
        faulty_nixl.install()
        return super()._configure(spec)

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

    def fault_reports(self) -> tuple[FaultReport, ...]:
        """Return what the faults did, one record a rank."""
        return tuple(self._workers(rank_faults.fault_report))


def serve(connection: Connection, spec: ByteEngineSpec) -> None:
    """Run the engine in a child of the zygote, see `engine.process.serve`."""
    engine_process.serve(connection, spec, FaultyEngineProcess)
