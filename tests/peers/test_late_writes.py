"""A load that D gives up, or while P stands still, on NIXL over TCP: the cases find who writes afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.peers.conftest import Reported

CASE = "nothing_is_written_when_p_wakes"
MODULE = ("protocol/peers/late_writes",)
LOAD_S = '{"kv_connector_extra_config": {"kv_lease_duration": %d, "transfer_timeout": 1}}'


def test_a_read_that_was_only_released_writes_into_other_requests(run_cases: Callable[..., Reported]) -> None:
    [(name, (outcome, why))] = run_cases("CancelsByRelease", "P1D1", modules=MODULE, config=LOAD_S).items()
    assert (name, outcome) == (CASE, "FAIL")
    assert re.search(
        "went on when the load of D had passed its time limit and the request of D had been aborted: rank 0 "
        "of D found bytes in blocks of other requests .*\n.*releasing a NIXL handle does not cancel its read",
        why,
    ), why


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
