"""A D that does not renew P's lease on each rank of P is found, and a P that frees late."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from pytest_kvconform.rigs.cluster.peers import bench, scenarios
from tests.peers.conftest import Reported

MODULE = ("protocol/peers/lease",)
CASES = [f"blocks_are_kept_while_d_waits[{where}_past_lease]" for where in ("queued", "loading")]
FREES = "expired_lease_frees_blocks"


@pytest.fixture
def leases_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run no scenario that the cases do not need: the others would only take long."""
    monkeypatch.setattr(bench, "SCENARIOS", dict.fromkeys(bench.SCENARIOS, scenarios.OF_LEASES))


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
