"""Loads that D gives up while P stands still, on the real transport: nothing is written when P goes on."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.kvspace.pools.diagnose import count_pool, diagnose_pool
from pytest_kvconform.kvspace.pools.draw import draw_pool
from pytest_kvconform.result import Evidence, Finding, NotApplicable, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.peers.sleeping_peer import ABORT, LIMIT
from pytest_kvconform.suite._peer_observations import (
    STUCK,
    WRONG,
    check_right,
    completed,
    evidence,
    one_rank,
    outcome_of,
)

GIVEN_UP = {
    LIMIT: "the load of D had passed its time limit",
    ABORT: "the request of D had been aborted",
}
AFTER = "P's process was stopped during a load of D, and went on: the next request of D"


@case("KV-FAIL-004", rig="peers", applies=one_rank, scenarios=("sleeping_peer",))
def nothing_is_written_when_p_wakes(bench: Bench, variant: None) -> Evidence:
    """P's process is stopped during a load of D and goes on later: no byte of another request changes."""
    observed = completed(bench, "sleeping_peer", "KV-FAIL-004")
    given_up = [GIVEN_UP[why] for why in GIVEN_UP if observed.numbers[why]]
    for check in observed.audits:
        if check.pool.wrong:
            raise Violation(
                Finding(
                    rule="KV-FAIL-004",
                    happened="P's process was stopped during a load of D, and went on when "
                    f"{' and '.join(given_up) or 'D still waited'}: rank {check.rank} of D found bytes in "
                    "blocks of other requests that these had not written",
                    differs=count_pool(check.pool),
                    picture=draw_pool(check.pool),
                    diagnosis="vLLM gave D's blocks to other requests when the connector had reported the "
                    "end of the load, and then something wrote into them, as a transfer that goes on or one "
                    f"that is begun again: {diagnose_pool(check.pool)}",
                    signature="something writes into D's blocks after the end of the load was reported",
                    log=observed.log[-4:],
                )
            )
    if outcome_of(observed.decodes["after"]) in (WRONG, STUCK):  # it may pass its time limit, too
        check_right("KV-FAIL-004", observed, bench.peers.lease_s, {"after": AFTER})
    if not observed.numbers["loads"]:
        raise NotApplicable("no load of D was seen under way while P's process was stopped")
    return evidence(len(observed.audits), "pools", observed, given_up_early=len(given_up))
