"""A machine on which a request takes longer than P's lease is no reason to say that a connector is wrong."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_kvconform.result import Blocked, Cell, Violation
from pytest_kvconform.rigs.cluster import engine as cluster_engine
from pytest_kvconform.rigs.cluster import loop
from pytest_kvconform.rigs.cluster.peers import bench as peer_bench
from pytest_kvconform.rigs.cluster.peers.bench import PeerBench, is_late
from pytest_kvconform.rigs.cluster.peers.scenario_engines import (
    DecodeResult,
    ScenarioEngines,
    ScenarioObservation,
)
from pytest_kvconform.rigs.engine.messages import Trace
from pytest_kvconform.rigs.history import History
from pytest_kvconform.rigs.processes import cores
from pytest_kvconform.suite import _peer_observations
from pytest_kvconform.suite._peer_observations import check_right
from pytest_kvconform.suite.protocol.peers import unreachable

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


def test_a_run_that_was_too_slow_is_late() -> None:
    assert is_late(scenario("length", 4.1), LEASE_S)
    assert not is_late(scenario("length", 3.9), LEASE_S)
    assert not is_late(scenario("", 60.0), LEASE_S)  # a request that does not end is no matter of leases
    waits = {"waiting": scenario("length", 9.0).decodes["good"]}
    assert not is_late(ScenarioObservation(waits), LEASE_S)
    unanswered = {name: scenario("error", 9.0).decodes["good"] for name in ("answering", "time_limit")}
    assert not is_late(ScenarioObservation(unanswered), LEASE_S)
    assert is_late(ScenarioObservation(waits, too_slow="engines were not stepped"), LEASE_S)
    freed = {why: ScenarioObservation(waits, numbers={"waiting": why}) for why in (LEASE_S, 0.1, -2.9)}
    assert [why for why, found in freed.items() if is_late(found, LEASE_S)] == [LEASE_S]


@pytest.mark.parametrize(
    ("seconds", "others", "outcome"),
    [(0.45, 0.0, "passes"), (1.0, 0.3, "fails"), (0.6, 0.3, "is blocked"), (1.0, 0.6, "is blocked")],
)
def test_a_hook_that_may_have_waited_for_a_thread_without_a_core_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, seconds: float, others: float, outcome: str
) -> None:
    bench = calls_of_start_load_kv([[0.4, 0.3, 0.3], [0.5, seconds, others], [2.5, 0.01, 0.0]], monkeypatch)
    expected = {"passes": contextlib.nullcontext(), "fails": pytest.raises(Violation)}
    with expected.get(outcome, pytest.raises(Blocked, match="too slow to tell whether it waits for P")):
        unreachable.start_load_kv_does_not_wait_for_p(bench, "meeting")


@pytest.mark.parametrize(
    ("calls", "when"), [([[2.5, 0.01, 0.0]], "was stopped"), ([[0.5, 1.0, 0.0]], "went on")]
)
def test_a_hook_that_was_not_called_was_not_measured(
    monkeypatch: pytest.MonkeyPatch, calls: list[list[float]], when: str
) -> None:
    bench = calls_of_start_load_kv(calls, monkeypatch)
    with pytest.raises(Blocked, match=f"did not call start_load_kv once while P {when}"):
        unreachable.start_load_kv_does_not_wait_for_p(bench, "meeting")


def calls_of_start_load_kv(calls: list[list[float]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bench that has observed a P which stood still for the first second, and not in the third one."""
    rank = History(times={"start_load_kv": np.array(calls)})
    words = {"meeting_from": 0.0, "meeting_to": 1.0, "calm_from": 2.0, "calm_to": 3.0}
    observed = replace(scenario("length", 1.0), numbers=words)
    monkeypatch.setattr(unreachable, "completed", lambda *_: observed)
    monkeypatch.setattr(unreachable, "engine", lambda *_: SimpleNamespace(ranks=(rank,)))
    monkeypatch.setattr(unreachable, "check_right", lambda *_: None)
    peers = SimpleNamespace(scaled_seconds=lambda seconds: seconds, lease_s=LEASE_S)
    return SimpleNamespace(cell=Cell("llama3_1_8b", "P1D1", "b16"), peers=peers)


def beside_a_silent_peer(
    bad: float, own: float, core_wait: float, **alone: tuple[float, str]
) -> ScenarioObservation:
    """Two requests that took so many seconds together, in `core_wait` of which D waited for a core.

    `alone`: others that came without them: seconds, and how they ended.
    """
    trace, took = Trace(id="d", prompt_tokens=55), {"bad": (bad, "error"), "own": (own, "length"), **alone}
    return ScenarioObservation(
        {
            name: DecodeResult(
                "d", 0.0, 0.0, seconds, finish, trace, (), core_wait if name in BESIDE else 0.0
            )
            for name, (seconds, finish) in took.items()
        }
    )


BESIDE = ("bad", "own")
HIDDEN = [
    (3.0, 2.95, 2.5, {}, True),  # D waited 3 s for the peer, or 2.5 s for a core
    (3.0, 2.95, 1.5, {}, False),  # it is noticeable in any case: the case judges it
    (3.0, 2.7, 2.5, {}, False),  # the other request ended clearly before
    (0.9, 0.89, 0.5, {}, False),  # the clock itself has not come to a noticeable wait
    (1.3, 1.25, 1.0, {"after": (1.2, "length")}, False),  # every request takes so long: none waits for a peer
    (3.0, 2.95, 2.5, {"after": (2.1, "length")}, False),
    (3.0, 2.95, 2.5, {"after": (1.9, "length")}, True),  # others are faster: it may be the peer
    (3.0, 2.95, 2.5, {"after": (2.8, "length"), "met": (0.5, "length")}, True),
    (3.0, 2.95, 2.5, {"after": (30.0, "")}, True),  # what does not end shows nothing
]


@pytest.mark.parametrize(("bad", "own", "core_wait", "alone", "late"), HIDDEN)
def test_a_delay_that_a_busy_machine_hides_is_looked_for_again(
    bad: float, own: float, core_wait: float, alone: dict[str, tuple[float, str]], late: bool
) -> None:
    found = beside_a_silent_peer(bad, own, core_wait, **alone)
    assert is_late(found, 60.0) == late
    assert not is_late(found, 60.0, noticeable_s=3.0)


@pytest.mark.parametrize(("bad", "own", "core_wait", "alone", "late"), [HIDDEN[4], HIDDEN[6]])
def test_a_busy_machine_blocks_no_case_whose_request_took_no_longer_than_any(
    monkeypatch: pytest.MonkeyPatch,
    bad: float,
    own: float,
    core_wait: float,
    alone: dict[str, tuple[float, str]],
    late: bool,
) -> None:
    found = beside_a_silent_peer(bad, own, core_wait, **alone)
    monkeypatch.setattr(unreachable, "completed", lambda *_: found)
    bench: Any = SimpleNamespace(peers=SimpleNamespace(scaled_seconds=lambda seconds: seconds))
    if late:
        with pytest.raises(Blocked, match="too slow to tell whether"):
            unreachable.unreachable_peer_delays_no_other_request(bench, "silent_peer")
    else:
        assert unreachable.unreachable_peer_delays_no_other_request(bench, "silent_peer").looked_at == 1


@pytest.mark.parametrize(("part", "took", "runs"), [(0.5, 4.1, [1, 2]), (0.5, 3.9, [1]), (0.1, 4.1, [1])])
def test_scenarios_run_again_with_longer_leases_where_a_busy_machine_was_too_slow(
    monkeypatch: pytest.MonkeyPatch, part: float, took: float, runs: list[int]
) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr(peer_bench, "time", SimpleNamespace(monotonic=lambda: clock["now"]))
    monkeypatch.setattr(peer_bench, "own_core_wait", lambda: clock["now"] * part)
    context: Any = SimpleNamespace(
        progress=lambda sentence: None,
        lease_s=lambda asked: asked,
        asked_lease_s=lambda asked: LEASE_S,
        scaled_seconds=lambda seconds: seconds,
        shown_calls=[],
    )
    bench, seen = PeerBench(context), list[int]()

    def run(cell: Cell, scenarios: object) -> dict[str, ScenarioObservation]:
        clock["now"] += 30.0
        seen.append(bench._longer)
        return {"sleeping_peer": scenario("length", took)}

    monkeypatch.setattr(bench, "_run", run)
    bench.expect(["sleeping_peer"], ())
    for _ in range(2):
        assert bench.observe(Cell("llama", "P1D1"), "sleeping_peer").decodes
    assert seen == runs


def test_an_engine_and_what_steps_it_say_how_long_they_waited_for_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = {"now": 100.0, "waited": 0.0}
    monkeypatch.setattr(cluster_engine, "time", SimpleNamespace(monotonic=lambda: clock["now"]))
    monkeypatch.setattr(cores, "time", SimpleNamespace(monotonic=lambda: clock["now"]))
    monkeypatch.setattr(cores, "core_waits", lambda pids: {pid: {"1": clock["waited"]} for pid in pids})
    handle: Any = SimpleNamespace(
        process=SimpleNamespace(pid=1, watched=1),
        start_s=60.0,
        deadline_s=60.0,
        call_deadline=lambda seconds, pids: cores.Deadline(seconds, pids),
    )
    engine, waits = cluster_engine.Engine("D", handle), []
    for seconds, waited in ((1.0, 0.0), (5.0, 2.0), (5.0, 0.0)):  # two processes wait
        clock["now"], clock["waited"] = clock["now"] + seconds, clock["waited"] + waited
        waits.append(round(engine.core_wait(), 6))
    assert waits == [0.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("starved", "most", "lasts"), [(0.0, math.inf, 1.0), (0.25, math.inf, 2.0), (0.25, 1.5, 1.5)]
)
def test_engines_run_for_seconds_in_which_they_have_a_core(
    monkeypatch: pytest.MonkeyPatch, starved: float, most: float, lasts: float
) -> None:
    """`starved`: the part of the time for which each of two processes waits for a core."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    for module in (loop, cores):
        monkeypatch.setattr(module, "time", clock)
    waits = {"1": {"1": 0.0}, "2": {"1": 0.0}}
    monkeypatch.setattr(
        cores, "core_waits", lambda pids: {p: dict.fromkeys(w, starved * clock.now) for p, w in waits.items()}
    )
    engine: Any = SimpleNamespace(handle=SimpleNamespace(process=SimpleNamespace(pid=1, watched=1)))
    for _ in loop.let_run(1.0, engine, most=most):
        clock.now += 0.05
    assert clock.now == pytest.approx(lasts, abs=0.3)


@pytest.mark.parametrize(
    ("gap", "waited", "slow"),
    [(2.5, math.inf, True), (2.0, math.inf, False), (2.5, 1.3, True), (2.5, 1.0, False)],
)
def test_a_lease_cannot_be_tested_if_engines_were_not_stepped(gap: float, waited: float, slow: bool) -> None:
    """Of a lease of 4 s. While D loads it may stand in a step: then it must have waited for a core, too."""
    engines: Any = SimpleNamespace(lease_s=4)
    p: Any = SimpleNamespace(longest_gap=gap, stepped_at=math.inf)
    d: Any = SimpleNamespace(longest_gap=0.0, stepped_at=math.inf)
    said = ScenarioEngines.too_slow(engines, p, d, waited)
    assert said.startswith("engines were not stepped for 2.5 s") if slow else said == ""


def first_of_another_d(took: float, external_tokens: int = 48) -> DecodeResult:
    trace = Trace(id="first", prompt_tokens=55, external_tokens=external_tokens)
    return DecodeResult("first", 0.0, 0.0, took, "length", trace, ())


NEVER_MEETS: dict[str, DecodeResult] = {}
MEETS, HARDLY_MEETS = {"first": first_of_another_d(1.0)}, {"first": first_of_another_d(2.5)}


@pytest.mark.parametrize(
    ("what", "took", "waited", "others", "raises"),
    [
        ("refused", 5.2, 0.2, MEETS, Violation),  # another D meets its P in time, and this one does not
        ("computed", 5.2, 0.2, MEETS, Violation),
        ("refused", 5.2, 0.2, HARDLY_MEETS, Blocked),  # a little slower, and that D is too late as well
        ("refused", 5.2, 0.2, NEVER_MEETS, Blocked),  # it takes longer than a lease to meet any P
        ("refused", 5.2, 4.0, MEETS, Blocked),  # no time for a core
        ("refused", 2.0, 1.5, MEETS, Blocked),  # whatever the lease: a D may be less patient
        ("refused", 2.0, 0.2, NEVER_MEETS, Violation),
        ("wrong", 9.0, 0.2, MEETS, Blocked),  # P has overwritten its blocks: a matter of leases
        ("wrong", 3.9, 3.0, MEETS, Violation),  # P keeps its blocks for so long, on any machine
        ("stuck", 30.0, 0.2, NEVER_MEETS, Violation),
    ],
)
def test_a_slow_answer_after_garbage_is_told_from_none(
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    took: float,
    waited: float,
    others: dict[str, DecodeResult],
    raises: type[Exception],
) -> None:
    late = DecodeResult("d", 0.0, 0.0, took, "length", Trace(id="d", prompt_tokens=55), ())
    numbers, looked = {"sent": 1000.0, "ports": 1.0, "waited": waited}, []

    def observe(bench: Any, name: str, *_: Any) -> ScenarioObservation:
        looked.append(name)
        met = {"met": first_of_another_d(1.0)}  # D loads something of such prompts
        decodes = others if name == "hand_overs" else {**met, "stranger": late}
        return ScenarioObservation(decodes, numbers=numbers)

    def outcome_of(ended: DecodeResult) -> str:
        return "right" if ended.id == "first" else what

    monkeypatch.setattr(unreachable, "completed", observe)
    monkeypatch.setattr(unreachable, "observe", observe)
    monkeypatch.setattr(unreachable, "outcome_of", outcome_of)
    monkeypatch.setattr(_peer_observations, "outcome_of", outcome_of)
    bench: Any = SimpleNamespace(peers=SimpleNamespace(lease_s=LEASE_S))
    with pytest.raises(raises):
        unreachable.listener_survives_garbage_messages(bench, None)
    assert looked[-1] == "garbage_messages"  # whose calls a finding shows
