"""A D that does not renew P's lease in time, or on each rank of P, is found; and a P that frees late, or
early and without a copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from pytest_kvconform.rigs.cluster.peers import bench, scenarios
from tests.peers.conftest import Reported

MODULE = ("protocol/peers/lease",)
CASES = [f"blocks_are_kept_while_d_waits[{where}_past_lease]" for where in ("queued", "loading")]
FREES = "expired_lease_frees_blocks"
ENDS = [f"load_after_the_lease_is_detected[lease_ends_{when}_load]" for when in ("before", "during")]


@pytest.fixture
def leases_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run no scenario that the cases do not need: the others would only take long."""
    monkeypatch.setattr(bench, "SCENARIOS", dict.fromkeys(bench.SCENARIOS, scenarios.OF_LEASES))


def test_a_d_that_renews_more_slowly_than_p_s_lease_is_found(run_cases: Callable[..., Reported]) -> None:
    reported = run_cases("RenewsTooSlowly", "P1D1", modules=MODULE, judged=None)
    assert {name for name, (outcome, _) in reported.items() if outcome != "PASS"} == set(CASES)
    says = "D does not renew the lease in time, or P does not keep the blocks although D does"
    assert all(reported[name][0] == "FAIL" and says in reported[name][1] for name in CASES), reported


def test_a_d_that_renews_as_p_s_lease_demands_is_right(run_cases: Callable[..., Reported]) -> None:
    reported = run_cases("Reference", "P1D1", modules=MODULE, judged=None)
    assert {outcome for outcome, _ in reported.values()} == {"PASS"}, reported


@pytest.mark.usefixtures("leases_alone")
@pytest.mark.parametrize(
    ("connector", "case", "says"),
    [
        ("RenewsOnRankZero", CASES[0], "waited .* before it was scheduled (did not load|loaded) what P had"),
        ("ReapsInOrder", FREES, "later P still holds them; .* one that P had computed before it waits on D"),
        ("Reference", "", ""),
    ],
)
def test_each_rank_of_p_has_to_keep_and_to_free(
    run_cases: Callable[..., Reported], connector: str, case: str, says: str
) -> None:
    judged = [case] if case else None
    reported = run_cases(connector, "P2D1", modules=MODULE, judged=judged, shows="FAIL" if case else "")
    assert len(reported) == 4
    wrong = {name: why for name, (outcome, why) in reported.items() if outcome != "PASS"}
    assert set(wrong) == {case} - {""}, reported
    assert all(re.search(says, why) for why in wrong.values()), wrong


@pytest.mark.usefixtures("leases_alone")
def test_a_renewal_that_cuts_request_ids_apart_is_found(run_cases: Callable[..., Reported]) -> None:
    reported = run_cases("CutsAtCommas", "P2D1", modules=MODULE, judged=[CASES[0]], shows="KV-BYTES-001")
    wrong = {name: why for name, (outcome, why) in reported.items() if outcome != "PASS"}
    assert set(wrong) == {CASES[0]}, reported
    says = "loaded what P had written into .*; its id on P was .*, /:;.*\nrequests with ordinary ids waited"
    assert re.search(says, wrong[CASES[0]]), wrong


@pytest.mark.usefixtures("leases_alone")
def test_leases_that_nobody_renews_end_one_after_the_other(run_cases: Callable[..., Reported]) -> None:
    connector = "tests.right_connectors.sockets:TcpPull"
    assert run_cases(connector, "P1D1", modules=MODULE, judged=[FREES])[FREES] == ("PASS", "")


def test_a_p_that_hands_over_a_copy_may_free_its_blocks_at_once(run_cases: Callable[..., Reported]) -> None:
    connector, cases = "tests.right_connectors.amount:StagesCopies", [FREES, *ENDS, CASES[0]]
    reported = run_cases(connector, "P1D1", modules=MODULE, judged=cases)
    assert {name: reported[name] for name in cases if reported[name][0] != "PASS"} == {}


def test_a_p_that_frees_its_blocks_at_once_and_has_no_copy_is_found(
    run_cases: Callable[..., Reported],
) -> None:
    connector, cases = "tests.right_connectors.amount:CopiesNothing", [FREES, ENDS[1]]
    reported = run_cases(connector, "P1D1", modules=MODULE, judged=cases, shows="FAIL")
    assert "P freed the blocks of a request" in reported[FREES][1], reported
    assert reported[ENDS[1]][0] == "FAIL", reported
