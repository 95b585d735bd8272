"""A connector may leave the address of a peer alone for a while after a failure, and not for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.peers.conftest import LEASE_S, Reported

MODULE = ("protocol/peers/unreachable",)
RESTARTED = ("restarted_peer_is_a_new_engine[met]", "restarted_peer_is_a_new_engine[stranger]")
AFTER = (*RESTARTED, "load_ends_when_p_dies")


@pytest.mark.parametrize("connector", ["LeavesAlone", "LeavesAloneForGood"])
def test_d_may_compute_for_a_while_what_a_new_engine_has(
    run_cases: Callable[..., Reported], connector: str
) -> None:
    found = run_cases(connector, "P1D1", lease_s=LEASE_S, modules=MODULE, judged=AFTER)
    if connector == "LeavesAlone":
        assert {name: found[name] for name in found if found[name][0] != "PASS"} == {}
    else:
        for name in AFTER:
            outcome, why = found[name]
            assert outcome == "FAIL" and "was computed by D, although P had computed it" in why, why
