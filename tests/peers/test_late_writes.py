"""A load that D gives up, or while P stands still, on NIXL over TCP: the cases find who writes afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.peers.conftest import Reported

CASE = "nothing_is_written_when_p_wakes"
MODULE = ("protocol/peers/late_writes",)
LOAD_S = '{"kv_connector_extra_config": {"kv_lease_duration": %d, "transfer_timeout": 1}}'


WHEN = "went on when the load of D had passed its time limit and the request of D had been aborted: rank 0 "
FOUND = WHEN + "of D found bytes in blocks of other requests .*\n.*then something wrote into them, .*"
THEIRS = r"rows of another request \(owner \d+\); rows that the prefiller computed instead of the decoder"


@pytest.mark.parametrize("connector", ["CancelsByRelease", "ReadsAgain"])
def test_what_is_read_after_the_end_is_no_matter_of_handles(
    run_cases: Callable[..., Reported], connector: str
) -> None:
    """The words do not tell why they came: a read that goes on, or one that begins anew."""
    [(name, (outcome, why))] = run_cases(connector, "P1D1", modules=MODULE, config=LOAD_S).items()
    assert (name, outcome) == (CASE, "FAIL")
    assert re.search(FOUND + THEIRS, why), why
    assert "NIXL" not in why


def test_a_load_that_is_kept_until_its_read_ends_is_right(run_cases: Callable[..., Reported]) -> None:
    assert run_cases("Reference", "P1D1", modules=MODULE, config=LOAD_S)[CASE][0] == "PASS"


def test_nixl_connector_waits_for_the_read(run_cases: Callable[..., Reported]) -> None:
    assert run_cases("NixlConnector", "P1D1", modules=MODULE)[CASE][0] == "PASS"


def test_who_begins_no_load_shows_nothing(run_cases: Callable[..., Reported]) -> None:
    outcome, why = run_cases("AsksFirst", "P1D1", modules=MODULE)[CASE]
    assert outcome == "NOT-APPLICABLE" and "no load of D was seen" in why, why


def test_transfers_that_have_not_begun_may_be_dropped(run_cases: Callable[..., Reported]) -> None:
    ranks, case = ("protocol/peers/rank_reports",), "aborted_load_is_reported_at_its_end"
    outcome, why = run_cases("Cancels", "P1D1", modules=ranks)[case]
    assert outcome == "NOT-APPLICABLE" and "D drops transfers of an aborted load that have not begun" in why
    outcome, why = run_cases("CancelsHalf", "P1D1", modules=ranks)[case]
    says = "words changed that no request may change|the next request of D loaded wrong bytes"
    assert outcome == "FAIL" and re.search(says, why), why
