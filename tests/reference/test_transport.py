"""What the transport asks of NIXL, and what it makes of the answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reference_connector.plan import Runs
from reference_connector.transport import Memory, Nixl, TransportError


class Agent:
    """A NIXL agent that does not let go of some memory."""

    def __init__(self) -> None:
        self.registered: list[Any] = []
        self.asked: list[Any] = []

    def register_memory(self, pieces: Any, kind: str) -> str:
        self.registered.append(kind)
        return kind

    def deregister_memory(self, descriptors: str) -> None:
        self.registered.remove(descriptors)
        if descriptors == "DRAM":
            raise RuntimeError("NIXL_ERR_BACKEND")

    def get_xfer_descs(self, rows: Any, kind: str) -> tuple[str, Any]:
        assert rows.flags.c_contiguous and rows.dtype == np.int64
        return kind, rows.tolist()

    def initialize_xfer(self, operation: str, here: Any, there: Any, peer: str) -> None:
        self.asked = [operation, *here, *there, peer]


def test_close_goes_on_where_nixl_refuses() -> None:
    agent = Agent()
    transport = object.__new__(Nixl)
    transport._agent, transport._registered = agent, []
    transport.register([Memory(0, 8), Memory(8, 8, ("VRAM", 1))])
    assert agent.registered == ["DRAM", "VRAM"]
    transport.close()
    assert not agent.registered
    assert not hasattr(transport, "_agent"), "its threads and sockets end with it"


def test_a_read_is_rows_of_address_length_device() -> None:
    agent = Agent()
    transport = object.__new__(Nixl)
    transport._agent = agent
    transport.prepare("p", Runs(*np.array([[10, 20], [30, 40], [5, 6]])), ("VRAM", 2), ("DRAM", 0))
    assert agent.asked == ["READ", "VRAM", [[10, 5, 2], [20, 6, 2]], "DRAM", [[30, 5, 0], [40, 6, 0]], "p"]


@pytest.mark.parametrize(("state", "done"), [("DONE", True), ("PROC", False), ("ERR", None)])
def test_the_state_of_a_read(state: str, done: bool | None) -> None:
    transport = object.__new__(Nixl)
    transport._agent = SimpleNamespace(check_xfer_state=lambda handle: state)
    if done is None:
        with pytest.raises(TransportError, match="the state of the transfer is ERR"):
            transport.done(None)
    else:
        assert transport.done(None) is done
