"""Failed blocks are counted in the scenario of their load: a load of another one may have had the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from pytest_kvconform.rigs.bytes.faulty.messages import EngineObservation
from pytest_kvconform.rigs.cluster.peers.scenario_engines import DecodeResult, ScenarioObservation
from pytest_kvconform.rigs.engine.messages import Trace
from pytest_kvconform.rigs.history import Call, History
from pytest_kvconform.rigs.vllm_setup.hooks import ERRORS, FAILED_RECVING, RECVING, RESULTS, SENDING
from pytest_kvconform.suite.protocol.peers import rank_reports


def test_they_may_fail_with_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run of engines with small pools gives each block to many loads."""
    old, new = (*failed_load(9, "old"),), (*failed_load(20, "new"),)
    before = History(old, {ERRORS: 12})
    now = History((*old, *new), {ERRORS: 30})
    ends = {
        name: DecodeResult(name, 0.0, 0.0, 1.0, "error", Trace(id=name, prompt_tokens=52), ())
        for name in ("failed", "last")
    }
    observed = ScenarioObservation(
        ends, ranks=(now.since(before),), engines={"D9": EngineObservation((now,), {}, History(), 1)}
    )
    monkeypatch.setattr(rank_reports, "completed", lambda *_: observed)
    monkeypatch.setattr(rank_reports, "check_right", lambda *_: 0)
    case = inspect.unwrap(rank_reports.failed_load_is_reported_once)
    evidence = case(SimpleNamespace(peers=SimpleNamespace(lease_s=3.0)), None)
    assert (evidence.looked_at, evidence.notes["reports"]) == (18, 1)


def failed_load(step: int, request: str) -> Iterator[Call]:
    """What a rank answers in the step in which a load has failed."""
    yield Call(RESULTS, "", step, {}, {SENDING: (), RECVING: (request,), FAILED_RECVING: (request,)})
    yield Call(ERRORS, "", step, {}, (3, 4))
