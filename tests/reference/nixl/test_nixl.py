"""What NIXL does with reads in progress, over UCX and TCP, and whether the tests' double does the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference_connector.transport import Memory
from tests.reference.doubles import Local, Wire
from tests.reference.nixl.nixl_behaviour import SCENARIOS, SHARED, Reader

PATIENCE_S = 240
# The facts on which reads.py stands. A version of NIXL that can cancel a read changes some of them.
EXPECTED = {
    "released": {
        "before": "PROC",
        "release": True,
        "after": "DONE",
        "release again": True,
        "goes on writing": True,
    },
    "disconnected": {"disconnect": True, "after": "ERR", "goes on writing": True, "prepare": False},
    "stopped": {"ends": False, "begin again": False, "after": "DONE", "reads": True},
    "died": {
        "before": "PROC",
        "after": "ERR",
        "goes on writing": False,
        "release": True,
        "prepare": True,
        "begin": False,
        "notify": False,
        "disconnect": True,
        "prepare after": False,
        "notify after": False,
    },
    "not_begun": {"before": "ERR", "release": True},
    "closed": {"goes on writing": False},
    "notified": {"at first": "DONE", "after a notification": "PROC", "after a read": "DONE"},
}


class InProcess:
    """A peer on the tests' wire."""

    def __init__(self, wire: Wire, d: Local):
        self.wire, self.peer = wire, Local(wire, "p")
        self.memory = np.full(64, 7, np.uint8)
        self.name, self.address = d.connect(self.peer.metadata()), self.memory.ctypes.data

    def stop(self) -> None:
        self.wire.stopped.add("p")

    def go_on(self) -> None:
        self.wire.stopped.discard("p")
        self.wire.calls["p"] += 1

    def die(self) -> None:
        self.go_on()
        self.peer.close()


@pytest.mark.parametrize("scenario", SCENARIOS + SHARED, ids=lambda scenario: scenario.__name__)
def test_the_double_does_what_nixl_does(scenario: Any) -> None:
    wire, memory = Wire(shared=scenario in SHARED), np.zeros(64, np.uint8)
    d = Local(wire, "d")
    d.register([Memory(memory.ctypes.data, memory.nbytes)])
    assert scenario(Reader(d, memory, InProcess(wire, d))) == EXPECTED[scenario.__name__]


@pytest.mark.parametrize(("transports", "scenarios"), [("tcp,self", SCENARIOS), ("tcp,self,sm", SHARED)])
def test_nixl_does_what_the_double_does(transports: str, scenarios: Any) -> None:
    root = Path(__file__).parents[3]
    environment = os.environ | {"UCX_TLS": transports, "UCX_NET_DEVICES": "lo", "PYTHONPATH": str(root)}
    environment["UCX_KEEPALIVE_INTERVAL"] = "inf"  # a message as well, every 20 s
    run = subprocess.run(
        [sys.executable, "-m", "tests.reference.nixl.nixl_behaviour"],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    found: dict[str, Any] = {}
    for line in (line for line in run.stdout.splitlines() if line.startswith("{")):
        found |= json.loads(line)
    assert found == {one.__name__: EXPECTED[one.__name__] for one in scenarios}, run.stderr[-2000:]
