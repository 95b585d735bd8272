"""With --kv-timeout-scale a peer stands still for longer, and what counts as held up takes longer."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.result import Blocked, Cell, Evidence, Violation
from pytest_kvconform.rigs.cluster.peers import scenarios
from pytest_kvconform.rigs.cluster.peers.bench import PeerBench
from pytest_kvconform.rigs.cluster.peers.scenario_engines import DecodeResult, ScenarioObservation
from pytest_kvconform.rigs.context import RunContext, SubjectFacts
from pytest_kvconform.rigs.engine.messages import Trace
from pytest_kvconform.settings import Settings
from pytest_kvconform.suite.protocol.peers import unreachable


def bench(scale: float) -> Any:
    """As much of a bench as one of these needs."""
    subject: Any = SimpleNamespace(profile="p2p", lease="", module="m", connector="C", folder="", config={})
    facts = SubjectFacts(name="", module="", file="", supports_hma=True, vllm="0.32.0", device="cpu")
    settings = Settings(timeout_scale=scale)
    context = RunContext("", subject, settings, facts, lambda sentence: None)
    return SimpleNamespace(
        context=context, settings=settings, subject=subject, cell=Cell("", ""), peers=PeerBench(context)
    )


@pytest.mark.parametrize(("scale", "stall"), [(0.4, 1.0), (1.0, 1.0), (3.0, 3.0)])
def test_a_peer_stands_still_for_longer(monkeypatch: pytest.MonkeyPatch, scale: float, stall: float) -> None:
    paused: list[tuple[float, float]] = []
    monkeypatch.setattr(
        scenarios, "let_run", lambda seconds, d, most: iter(paused.append((seconds, most)) or ())
    )

    def nothing(*_: Any) -> Iterator[None]:
        yield

    engines = SimpleNamespace(
        bench=bench(scale).peers,
        prefill=nothing,
        add_decode=nothing,
        finish_decode=nothing,
        decode=nothing,
        new_prompt=lambda: 0,
        make_request=lambda *_: None,
    )
    p: Any = SimpleNamespace(stop_process=nothing, resume=lambda: None, queue=lambda *_: None)
    for _ in scenarios.stopped_peer(engines, p, p):
        pass
    assert paused == 2 * [(stall, 1.5 * stall)]  # while they meet, and while one reads


@pytest.mark.parametrize(("scale", "limit"), [(0.4, 1.0), (1.0, 1.0), (3.0, 3.0)])
def test_what_counts_as_held_up_is_longer(
    monkeypatch: pytest.MonkeyPatch, scale: float, limit: float
) -> None:
    def check(took_s: float) -> Evidence:
        """Check a request that took `took_s`, and that came together with one whose peer does not answer."""
        ended = DecodeResult("d", 0.0, 0.0, took_s, "length", Trace(id="d", prompt_tokens=55), ())
        monkeypatch.setattr(
            unreachable, "completed", lambda *_: ScenarioObservation({"bad": ended, "own": ended})
        )
        return unreachable.unreachable_peer_delays_no_other_request(bench(scale), "silent_peer")

    assert check(limit - 0.1).looked_at == 1
    with pytest.raises(Violation, match=r"took \d\.1 s: it came together with one"):
        check(limit + 0.1)


@pytest.mark.parametrize(
    ("bad", "own", "core_wait", "delayed"),
    [
        (5.0, 4.9, 0.0, Violation),
        (1.5, 1.5, 0.0, Violation),
        (5.0, 0.3, 0.0, None),
        (4.0, 3.6, 3.3, None),  # everything takes long: the machine is busy
        (12.0, 11.9, 6.0, Violation),
        (4.0, 3.95, 3.3, Blocked),  # so busy that the wait of D for its peer shows no more
    ],
)
def test_time_in_which_d_waits_for_a_core_is_no_delay(
    monkeypatch: pytest.MonkeyPatch, bad: float, own: float, core_wait: float, delayed: type[Exception] | None
) -> None:
    took, trace = {"bad": bad, "own": own}, Trace(id="d", prompt_tokens=55)
    decodes = {
        name: DecodeResult("d", 0.0, 0.0, seconds, "length", trace, (), core_wait)
        for name, seconds in took.items()
    }
    monkeypatch.setattr(unreachable, "completed", lambda *_: ScenarioObservation(decodes))
    if delayed:
        with pytest.raises(delayed):
            unreachable.unreachable_peer_delays_no_other_request(bench(1.0), "silent_peer")
    else:
        assert unreachable.unreachable_peer_delays_no_other_request(bench(1.0), "silent_peer").looked_at == 1
