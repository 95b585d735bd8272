"""Failed blocks are counted in the scenario of their load: a load of another one may have had the same."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest

from pytest_kvconform.rigs.bytes.faulty.messages import EngineObservation, RankObservation, RankReport
from pytest_kvconform.rigs.cluster.peers.scenario_engines import DecodeResult, ScenarioObservation
from pytest_kvconform.rigs.engine.messages import Trace
from pytest_kvconform.suite.protocol.peers import rank_reports


def test_they_may_fail_with_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run of engines with small pools gives each block to many loads."""
    failed = RankReport(20, (), ("new",), ("new",), (3, 4), True)
    before = RankObservation(
        0, (RankReport(9, (), ("old",), ("old",), (3, 4), True),), 12, 9, 12, np.zeros((0, 3))
    )
    now = RankObservation(0, (*before.reports, failed), 30, 20, 30, np.zeros((0, 3)))
    ends = {
        name: DecodeResult(name, 0.0, 0.0, 1.0, "error", Trace(id=name, prompt_tokens=52), ())
        for name in ("failed", "last")
    }
    observed = ScenarioObservation(
        ends, ranks=(now.since(before),), engines={"D9": EngineObservation((now,), {}, ())}
    )
    monkeypatch.setattr(rank_reports, "completed", lambda *_: observed)
    monkeypatch.setattr(rank_reports, "check_right", lambda *_: 0)
    case = inspect.unwrap(rank_reports.failed_load_is_reported_once)
    evidence = case(SimpleNamespace(peers=SimpleNamespace(lease_s=3.0)), None)
    assert (evidence.looked_at, evidence.notes["reports"]) == (18, 1)
