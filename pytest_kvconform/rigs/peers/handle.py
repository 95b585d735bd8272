"""A handle on a peer engine: its calls can be sent and their answers taken without waiting."""

from __future__ import annotations

from typing import Any

from pytest_kvconform.rigs.peers.faulty_engine import FaultyEngineHandle
from pytest_kvconform.rigs.processes.cores import Deadline


class PeerEngineHandle(FaultyEngineHandle):
    """A handle on `process.PeerEngineProcess`."""

    target = "pytest_kvconform.rigs.peers.process:serve"

    def answered(self) -> bool:
        """Whether an answer, or the end of the process, can be read without waiting."""
        return self.process.connection.poll(0)

    def take_answer(self, name: str) -> Any:
        """The answer to a call, which has arrived. Raises EngineFailed."""
        return self.wait_ready() if name == "start" else self.answer(name)

    def fail_as_hung(self, name: str, deadline: Deadline) -> None:
        """Note that the engine has not answered a call by its deadline. Raises EngineFailed."""
        self._hung(name, deadline)
