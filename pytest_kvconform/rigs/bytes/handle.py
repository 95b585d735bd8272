"""The handle on a byte engine in a process of its own. Every call has a deadline, see `EngineHandle`."""

from __future__ import annotations

from pytest_kvconform.kvspace.pools.sources import Source
from pytest_kvconform.rigs.bytes.messages import Check
from pytest_kvconform.rigs.engine.handle import EngineHandle


class ByteEngineHandle(EngineHandle):
    """A handle on one byte engine. Methods are those of `bytes.process.ByteEngineProcess`."""

    target = "pytest_kvconform.rigs.bytes.process:serve"

    def pop_checks(self, request_id: str) -> tuple[Check, ...]:
        """Return and forget the checks of a request: for each load one per rank.

        They were made before the first forward that reads the loaded KV.
        """
        return self.call("pop_checks", request_id)

    def audit(self) -> tuple[Check, ...]:
        """The whole pool of every rank against what it should hold. A difference is reported once."""
        return self.call("audit")

    def source(self) -> Source:
        """Where the rows of rank 0 lie, for the diagnosis of what D received."""
        return self.call("source")

    def preempt(self, request_id: str) -> None:
        """Preempt a running request in the next step."""
        self.call("preempt", request_id)

    def reuse(self, on: bool) -> None:
        """Let other requests overwrite blocks that are freed, from now on or no longer."""
        self.call("reuse", on)

    def overwritten(self) -> bool:
        """Whether every block that was freed has been overwritten."""
        return self.call("overwritten")

    def flip(self, rank: int, layer: str, block: int, byte: int) -> None:
        """Corrupt a byte of one rank's pool: for tests of the rig."""
        self.call("flip", rank, layer, block, byte)
