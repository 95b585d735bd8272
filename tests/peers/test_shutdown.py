"""A D that shuts down while it loads from a P which stands still: the case finds who writes on, or waits."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.peers.conftest import Reported

CASE = "nothing_is_written_after_shutdown"
MODULE = ("protocol/peers/shutdown",)
LEASE_S = 30  # no lease is to end, however slow the machine is
WRONG = {
    "LeavesThreads": r"\d+ bytes of D's KV cache changed after .*\n.*or a thread that goes on writing",
    "EndsWithItsReads": r"shutdown\(\) had not returned after \d+ s\n.*without a deadline",
}


@pytest.mark.parametrize("connector", WRONG)
def test_who_does_not_end_its_loads_is_found(run_cases: Callable[..., Reported], connector: str) -> None:
    scale = 0.3 if connector == "EndsWithItsReads" else 1.0  # of deadlines, where one of them is waited for
    found = run_cases(connector, "P1D1", scale=scale, lease_s=LEASE_S, modules=MODULE)
    [(name, (outcome, why))] = found.items()
    assert (name, outcome) == (CASE, "FAIL"), why
    assert re.search(WRONG[connector], why), why


@pytest.mark.parametrize("connector", ["Reference", "NixlConnector", "TcpPull"])
def test_right_connectors_end_their_loads(run_cases: Callable[..., Reported], connector: str) -> None:
    outcome, why = run_cases(connector, "P1D1", lease_s=LEASE_S, modules=MODULE)[CASE]
    assert outcome == "PASS", why


def test_who_loads_within_the_step_cannot_be_shut_down_meanwhile(run_cases: Callable[..., Reported]) -> None:
    outcome, why = run_cases(
        "tests.right_connectors.designs:LayerWise", "P1D1", lease_s=LEASE_S, modules=MODULE
    )[CASE]
    assert outcome == "NOT-APPLICABLE" and "within the step" in why, why
