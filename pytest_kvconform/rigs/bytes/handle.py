"""A handle on a pattern engine in a process of its own. Every call has a deadline, see `engine.EngineHandle`."""

from __future__ import annotations

from pytest_kvconform.kvspace.pools.mistakes import Source
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec, Check
from pytest_kvconform.rigs.engine.handle import EngineHandle


class ByteEngineHandle(EngineHandle):
    """One pattern engine. Methods mirror `byte_process.ByteEngineProcess`; every one raises EngineFailed when the process cannot answer."""

    target = "pytest_kvconform.rigs.bytes.process:serve"

    def __init__(self, address: str, name: str, spec: ByteEngineSpec, deadline_s: float, start_s: float):
        super().__init__(address, name, spec, deadline_s, start_s)
        self.ranks = spec.tensor_parallel

    def pop_checks(self, request_id: str) -> tuple[Check, ...]:
        """The checks of a request: one per rank for each load, made before the first forward that read what was loaded."""
        return self.call("pop_checks", request_id)

    def audit(self) -> tuple[Check, ...]:
        """The whole pool of every rank against what should be there. What differs is reported once."""
        return self.call("audit")

    def source(self) -> Source:
        """Where the rows of rank 0 lie, for the diagnosis of what D received."""
        return self.call("source")

    def preempt(self, request_id: str) -> None:
        """Preempt a running request in the next step."""
        self.call("preempt", request_id)

    def reuse(self, on: bool) -> None:
        """From now on overwrite blocks the moment they become free, or no longer."""
        self.call("reuse", on)

    def flip(self, rank: int, layer: str, block: int, byte: int) -> None:
        """Spoil a byte of one rank's pool: for tests of the rig."""
        self.call("flip", rank, layer, block, byte)
