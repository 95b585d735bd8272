"""What D knows of one P is not used for another: the case finds who does, and right connectors pass it.

After a failure D may leave a port alone for a while, and not for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from pytest_kvconform.rigs.peers.scenarios import APART
from tests.peers.conftest import Reported

RESTARTED = ("restarted_peer_is_a_new_engine[met]", "restarted_peer_is_a_new_engine[stranger]")
AFTER_A_FAILURE = (*RESTARTED, "load_ends_when_p_dies")
CASE = "each_load_is_from_its_own_peer"
MODULE = ("protocol/peers/two_peers",)
LEASE_S = 30  # no lease is to end, however slow the machine is
# What lies at an address of another P's pool may be no KV memory: then NIXL refuses to read it.
WRONG = {
    "PairsOnce": "in turn: the first request for KV of the second P, .* (loaded wrong|ended with an err)",
    "PairsWithTheLast": "in turn: the second request for KV of the first P (loaded wrong|ended with an err)",
}


@pytest.mark.parametrize("connector", WRONG)
def test_addresses_of_another_peer_are_found(run_cases: Callable[..., Reported], connector: str) -> None:
    [(name, (outcome, why))] = run_cases(connector, "P1D1", lease_s=LEASE_S, modules=MODULE).items()
    assert (name, outcome) == (CASE, "FAIL"), why
    assert re.search(WRONG[connector], why), why


@pytest.mark.parametrize(
    "connector",
    [
        "Reference",
        "NixlConnector",
        "tests.right_connectors.designs:LayerWise",
        "tests.right_connectors.sockets:TcpPull",
    ],
)
def test_right_connectors_keep_peers_apart(run_cases: Callable[..., Reported], connector: str) -> None:
    outcome, why = run_cases(connector, "P1D1", lease_s=LEASE_S, modules=MODULE)[CASE]
    assert outcome == "PASS", why


def test_scenarios_of_their_own_rules_share_no_engine() -> None:
    """What kills an engine in one of them, such as the handshake with another model, fails no other rule."""
    names = [name for one in APART.values() for name in (*one.engines, *one.other_engines)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("connector", ["LeavesAlone", "LeavesAloneForGood"])
def test_d_may_compute_for_a_while_what_a_new_engine_has(
    run_cases: Callable[..., Reported], connector: str
) -> None:
    found = run_cases(connector, "P1D1", modules=("protocol/peers/unreachable",), judged=AFTER_A_FAILURE)
    if connector == "LeavesAlone":
        assert {name: found[name] for name in found if found[name][0] != "PASS"} == {}
    else:
        for name in AFTER_A_FAILURE:
            outcome, why = found[name]
            assert outcome == "FAIL" and "was computed by D, although P had computed it" in why, why
