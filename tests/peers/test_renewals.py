"""A D that does not know how long P's lease is: the case about leases finds it."""

from __future__ import annotations

from collections.abc import Callable

from tests.peers.conftest import Reported

MODULE = ("protocol/peers/lease",)
CASES = [f"blocks_are_kept_while_d_waits[{where}_past_lease]" for where in ("queued", "loading")]


def test_a_d_that_renews_more_slowly_than_p_s_lease_is_found(run_cases: Callable[..., Reported]) -> None:
    reported = run_cases("RenewsTooSlowly", "P1D1", modules=MODULE, judged=None)
    assert {name for name, (outcome, _) in reported.items() if outcome != "PASS"} == set(CASES)
    says = "D does not renew the lease in time, or P does not keep the blocks although D does"
    assert all(reported[name][0] == "FAIL" and says in reported[name][1] for name in CASES), reported


def test_a_d_that_renews_as_p_s_lease_demands_is_right(run_cases: Callable[..., Reported]) -> None:
    reported = run_cases("Reference", "P1D1", modules=MODULE, judged=None)
    assert {outcome for outcome, _ in reported.values()} == {"PASS"}, reported
