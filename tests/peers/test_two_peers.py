"""What D knows of one P is not used for another, nor what it knows of one load for the next one of the same
hand-over: the cases find who does, and right connectors pass them.

After a failure D may leave a port alone for a while, and not for ever. Loads may fail together.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from pytest_kvconform.rigs.cluster.peers.scenarios import ON_THEIR_OWN
from tests.helpers.rings import night
from tests.peers.conftest import Reported

RESTARTED = ("restarted_peer_is_a_new_engine[met]", "restarted_peer_is_a_new_engine[stranger]")
AFTER_A_FAILURE = (*RESTARTED, "load_ends_when_p_dies")
TOGETHER = "unreachable_peer_fails_only_its_request[unreachable_peer]"
CASE = "each_load_is_from_its_own_peer"
FREED = "blocks_are_freed_whichever_d_loads"
MODULE = ("protocol/peers/two_peers",)
SAMPLES = ("protocol/peers/two_samples",)
SECOND = "second_sample_loads_right_bytes_or_none"
SHORT = 0.3  # of deadlines, where one of them has to be waited for
LEASE_S = 30  # no lease is to end, however slow the machine is
# What lies at an address of another P's pool may be no KV memory: then NIXL refuses to read it.
WRONG = {
    "PairsOnce": "in turn: the first request for KV of the second P, .* (loaded wrong|ended with an err)",
    "PairsWithTheLast": "in turn: the second request for KV of the first P (loaded wrong|ended with an err)",
}


def test_a_p_that_hears_one_d_alone_is_found(run_cases: Callable[..., Reported]) -> None:
    found = run_cases("CountsNoticesOfAll", "P1D1", lease_s=LEASE_S, modules=MODULE)
    assert {name: outcome for name, (outcome, _) in found.items()} == {CASE: "PASS", FREED: "FAIL"}, found
    assert re.search(
        "the first request of the second D was loaded, and .* P still holds its blocks", found[FREED][1]
    )


def test_a_d_that_notifies_one_p_in_a_step_is_found(run_cases: Callable[..., Reported]) -> None:
    found = run_cases("OnePeerAStep", "P1D1", lease_s=LEASE_S, modules=MODULE)
    assert {name: outcome for name, (outcome, _) in found.items()} == {CASE: "PASS", FREED: "FAIL"}, found
    assert re.search("from two P's at once: .* was loaded, and .* P still holds its blocks", found[FREED][1])


def test_a_d_that_releases_nothing_in_a_step_that_loads_is_found(run_cases: Callable[..., Reported]) -> None:
    found = run_cases("LoadsOrReleases", "P1D1", lease_s=LEASE_S, modules=MODULE)
    assert {name: outcome for name, (outcome, _) in found.items()} == {CASE: "PASS", FREED: "FAIL"}, found
    assert "in the step after another one has ended: the request whose load has ended was" in found[FREED][1]


@pytest.mark.parametrize("connector", WRONG)
def test_addresses_of_another_peer_are_found(run_cases: Callable[..., Reported], connector: str) -> None:
    outcome, why = run_cases(connector, "P1D1", lease_s=LEASE_S, modules=MODULE)[CASE]
    assert outcome == "FAIL", why
    assert re.search(WRONG[connector], why), why


@pytest.mark.parametrize(
    "connector",
    [
        "Reference",
        "NixlConnector",
        "tests.right_connectors.designs:LayerWise",
        "tests.right_connectors.sockets:TcpPull",
        "tests.push.right:TcpPush",
        "HoldsInPool",
    ],
)
def test_right_connectors_keep_peers_apart(run_cases: Callable[..., Reported], connector: str) -> None:
    found = run_cases(connector, "P1D1", lease_s=LEASE_S, modules=MODULE)
    assert {name: outcome for name, (outcome, _) in found.items()} == {CASE: "PASS", FREED: "PASS"}, found


@pytest.mark.parametrize(
    ("connector", "scale", "outcome", "words"),
    [
        ("CountsTimeAlone", 1.0, "FAIL", "loaded what P had written into the blocks since"),
        ("tests.push.wrong_connectors:ServesOneSample", SHORT, "KV-HANDOVER-001", "not end within 9 s"),
    ],
)
def test_a_second_sample_that_is_wrong_or_does_not_end_is_found(
    run_cases: Callable[..., Reported], connector: str, scale: float, outcome: str, words: str
) -> None:
    found = run_cases(connector, "P1D1", lease_s=LEASE_S, scale=scale, modules=SAMPLES)
    assert found[SECOND][0] == outcome and words in found[SECOND][1], found


@pytest.mark.parametrize(
    "connector",
    [
        "Reference",
        "Right",
        night("tests.right_connectors.amount:StagesCopies"),
        night("tests.right_connectors.answers:ServesOnce"),
        "tests.right_connectors.choices:CircuitBreaker",
        night("tests.right_connectors.designs:LayerWise"),
        "tests.right_connectors.sockets:TcpPull",
        "tests.push.right:TcpPush",
    ],
)
def test_a_second_sample_may_be_loaded_computed_or_refused(
    run_cases: Callable[..., Reported], connector: str
) -> None:
    assert run_cases(connector, "P1D1", lease_s=LEASE_S, modules=SAMPLES) == {SECOND: ("PASS", "")}


def test_scenarios_of_their_own_rules_share_no_engine() -> None:
    """What kills an engine in one of them, such as the handshake with another model, fails no other rule."""
    names = [name for one in ON_THEIR_OWN.values() for name in (*one.engines, *one.other_engines)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("connector", [night("LeavesAlone"), "LeavesAloneForGood"])
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


@pytest.mark.parametrize(
    "connector", ["ReportsOneFailure", "Reference", night("tests.right_connectors.sockets:TcpPull")]
)
def test_each_of_two_loads_that_fail_together_is_reported(
    run_cases: Callable[..., Reported], connector: str
) -> None:
    found = run_cases(connector, "P1D1", modules=("protocol/peers/unreachable",), judged=[TOGETHER])
    outcome, why = found[TOGETHER]
    if connector == "ReportsOneFailure":
        assert outcome == "FAIL" and "a request of D loaded something, and no process listens" in why, why
        assert "ends one of them alone as failed" in why
    else:
        assert outcome == "PASS", why
