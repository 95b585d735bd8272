"""A machine on which a request takes longer than P's lease is no reason to say that a connector is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_kvconform.result import Blocked, Violation
from pytest_kvconform.rigs.engine.messages import Trace
from pytest_kvconform.rigs.peers.scenario_engines import DecodeResult, ScenarioObservation
from pytest_kvconform.suite._peer_observations import check_right

LEASE_S = 4.0
WORDS = {"good": "the request"}


def scenario(finish: str, after_s: float) -> ScenarioObservation:
    """A request of D that ends `after_s` after P's has come; P's took a second."""
    trace, loaded = Trace(id="d", prompt_tokens=55), Trace(id="met", prompt_tokens=55, external_tokens=55)
    met = DecodeResult("met", 0.0, 1.0, 2.0, "length", loaded, ())
    good = DecodeResult("d", 0.0, 1.0, after_s, finish, trace, ())
    return ScenarioObservation({"met": met, "good": good})


def test_a_connector_that_loads_nothing_of_such_prompts_is_blocked() -> None:
    observed = scenario("length", 3.9)
    observed = replace(observed, decodes={"good": observed.decodes["good"]})
    with pytest.raises(Blocked, match=r"nothing of prompts of 55 tokens.*declare load_granularity or min_"):
        check_right("KV-PEER-001", observed, LEASE_S, WORDS)


@pytest.mark.parametrize("finish", ["error", "length"])
def test_a_request_that_ends_after_the_lease_is_blocked(finish: str) -> None:
    with pytest.raises(
        Blocked, match=r"ended 4\.1 s after P's request had come, and the lease is 4 s: --kv-timeout-scale"
    ):
        check_right("KV-PEER-001", scenario(finish, 4.1), LEASE_S, WORDS)


@pytest.mark.parametrize(
    ("finish", "after_s", "message"),
    [("error", 3.9, "ended with an error"), ("length", 3.9, "computed by D"), ("", 60.0, "did not end")],
)
def test_a_request_that_ends_within_the_lease_or_never_is_a_violation(
    finish: str, after_s: float, message: str
) -> None:
    with pytest.raises(Violation) as raised:
        check_right("KV-PEER-001", scenario(finish, after_s), LEASE_S, WORDS)
    assert message in raised.value.finding.happened
