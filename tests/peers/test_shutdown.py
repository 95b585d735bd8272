"""A D that shuts down while it loads from a P which stands still: the case finds who writes on, or waits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.result import Blocked, Cell, NotApplicable, Violation
from pytest_kvconform.rigs.cluster.engine import Call, Engine
from pytest_kvconform.rigs.cluster.peers import sleeping_peer
from pytest_kvconform.rigs.cluster.peers.scenario_engines import DecodeResult, ScenarioObservation
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.messages import Trace
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.suite.protocol.peers import shutdown

# ---- what the case judges, and what the scenario waits for -------------------------------------------------

ENDED = DecodeResult(
    "met", 0.0, 0.0, 1.0, "length", Trace(id="met", prompt_tokens=55, external_tokens=55), ()
)
LOADED = Trace(id="met", prompt_tokens=55, external_tokens=55, asynchronous=True)
LOADING = {"loading": 1.0, "ended": 0.0, "returned": 1.0, "written": 0.0, "early": 0.0, "p_ended": 0.0}


@pytest.mark.parametrize(
    ("changed", "met", "raises", "says"),
    [
        ({}, {}, None, ""),
        ({"loading": 0.0}, {}, NotApplicable, "begins no load from a P that stands still"),
        ({"loading": 0.0, "ended": 1.0}, {}, NotApplicable, "ended although P stood still"),
        ({}, {"finish": "error"}, Blocked, "before P's process was stopped, a request of D ended as refused"),
        ({}, {"finish": ""}, Blocked, "ended as stuck"),
        (
            {},
            {"trace": Trace(id="met", prompt_tokens=55)},
            Blocked,
            "D loads nothing of prompts of 55 tokens",
        ),
        ({"returned": 0.0}, {}, Violation, "had not returned after 15 s"),
    ],
)
def test_only_a_load_that_is_under_way_shows_something(
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, float],
    met: dict[str, Any],
    raises: type[Exception] | None,
    says: str,
) -> None:
    observed = ScenarioObservation({"met": replace(ENDED, **met)}, numbers={**LOADING, **changed})
    monkeypatch.setattr(shutdown, "completed", lambda *_: observed)
    right = shutdown.outcome_of
    monkeypatch.setattr(shutdown, "outcome_of", lambda ended: "right" if ended == ENDED else right(ended))
    bench: Any = SimpleNamespace(
        settings=SimpleNamespace(timeout_scale=0.5), cell=Cell("llama3_1_8b", "P1D1")
    )
    if raises is None:
        assert shutdown.nothing_is_written_after_shutdown(bench, None).notes["loading"] == 1
        return
    with pytest.raises(raises) as raised:
        shutdown.nothing_is_written_after_shutdown(bench, None)
    assert says in (
        raised.value.finding.happened if isinstance(raised.value, Violation) else str(raised.value)
    )


class SlowD:
    """A D that begins its load with the answer to a later call, as on a busy machine."""

    def __init__(self, begins: int):
        self.begins, self.asked, self.log = begins, 0, list[str]()
        self.ends: dict[str, Any] = {}
        self.pending = self.paused = None
        self.queued: list[Call] = []
        self.handle = SimpleNamespace(
            deadline_s=1.0, process=SimpleNamespace(pid=os.getpid(), watched=os.getpid())
        )

    def deadline(self, seconds: float) -> Deadline:
        return Deadline(seconds)

    def queue(self, name: str, *arguments: Any) -> Call:
        self.asked += 1
        self.log.append(name)
        loads = self.asked >= self.begins
        trace = Trace(id="d", prompt_tokens=55, external_tokens=48 * loads, asynchronous=loads)
        trace.status = "WAITING_FOR_REMOTE_KVS" if loads else "WAITING"
        return Call(name, arguments, {"trace": trace, "written_since_shutdown": 0}.get(name, ""), done=True)

    def call(self, name: str, *arguments: Any) -> Iterator[None]:
        yield
        return self.queue(name, *arguments).answer

    def resume(self) -> None:
        self.paused = None

    def end(self) -> None:
        self.log.append("end")


@pytest.mark.parametrize(("begins", "loading"), [(1, 1.0), (10, 1.0), (1 << 30, 0.0)])
def test_d_is_shut_down_when_it_has_begun_its_load(
    monkeypatch: pytest.MonkeyPatch, begins: int, loading: float
) -> None:
    monkeypatch.setattr(sleeping_peer, "SLEEP_S", 0.2)
    monkeypatch.setattr(sleeping_peer, "LOADING_S", 0.0)
    monkeypatch.setattr(sleeping_peer, "LATE_S", 0.0)

    def step(answer: Any) -> Callable[..., Iterator[None]]:
        def steps(*_: Any) -> Iterator[None]:
            yield
            return answer

        return steps

    settings = SimpleNamespace(timeout_scale=0.5)
    engines: Any = SimpleNamespace(
        bench=SimpleNamespace(scaled_seconds=float, context=SimpleNamespace(settings=settings)),
        prefill=step(None),
        decode=step(replace(ENDED, trace=LOADED)),
        add_decode=step(SimpleNamespace(id="d")),
    )
    d: Any = SlowD(begins)
    p: Any = SimpleNamespace(
        stop_process=step(None), resume=lambda: None, handle=d.handle, may_die=False, failed=None
    )
    steps = sleeping_peer.shutdown_during_load(engines, p, d)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        found = end.value
    assert found.numbers["loading"] == loading
    assert ("shutdown_during_loads" in d.log) == p.may_die == bool(loading)
    assert (
        not loading or d.handle.deadline_s >= 2 * 15
    )  # no call ends before the deadline that the case names


@pytest.mark.parametrize(
    ("may_die", "how", "fails"),
    [(False, "died", True), (True, "died", False), (True, "hung", True), (True, "raised", True)],
)
def test_an_engine_that_may_die_may_do_nothing_else(may_die: bool, how: str, fails: bool) -> None:
    engine = Engine.__new__(Engine)
    engine.may_die, engine.failed = may_die, None
    assert not engine.fails_script()
    engine.failed = EngineFailed("P", how, "P ended")
    assert engine.fails_script() == fails
