"""What the cases about peers report of a P that is full, of a long lease, and of vLLM's NixlConnector."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.peers.conftest import Reported

# Not applicable: NixlConnector loads the one token after the whole blocks that D's own cache has.
LOADS_ONE = "p_is_freed_without_a_load[whole]"
QUEUED, LOADING = (f"blocks_are_kept_while_d_waits[{how}_past_lease]" for how in ("queued", "loading"))
TOO_LATE = (
    "load_after_the_lease_is_detected[lease_ends_before_load] "
    "load_after_the_lease_is_detected[lease_ends_during_load]"
)


@pytest.mark.night
def test_a_full_p_is_waited_for_once(run_cases: Callable[..., Reported]) -> None:
    found = run_cases("KeepsBlocks", "P1D2")
    assert {name for name, (outcome, _) in found.items() if outcome == "FAIL"} == {"each_rank_reports_once"}
    blocked = [reason for outcome, reason in found.values() if outcome == "BLOCKED"]
    waited = [
        re.search(r"P had no room for a prompt of \d+ tokens within (\S+) s: \d of", why) for why in blocked
    ]
    assert all(waited), blocked
    assert sorted({float(match[1]) for match in waited if match})[:-1] == [0.1]


@pytest.mark.night
def test_what_is_found_in_nixl_connector(run_cases: Callable[..., Reported]) -> None:
    reported = run_cases("NixlConnector", "P1D1", judged=None)
    assert reported.pop(LOADS_ONE)[0] == "NOT-APPLICABLE"
    wrong = {name: outcome for name, (outcome, _) in reported.items() if outcome != "PASS"}
    late = ["unreachable_peer_delays_no_other_load[silent_peer]", "listener_survives_garbage_messages"]
    assert wrong == dict.fromkeys([*late, *TOO_LATE.split()], "FAIL") | {QUEUED: "KV-BYTES-001"}, reported


def test_a_long_lease_is_not_waited_for(run_cases: Callable[..., Reported]) -> None:
    reported = run_cases("TrustsLeases", "P1D1", lease_s=30)
    blocked = {
        name
        for name, (outcome, reason) in reported.items()
        if outcome == "BLOCKED" and "P may keep blocks that no peer has read for 30 s" in reason
    }
    assert blocked == {
        *TOO_LATE.split(),
        "expired_lease_frees_blocks",
        "late_notification_is_ignored",
        QUEUED,
        LOADING,
    }
