"""Stores on real engines: P saves, D finds it, and the oracle's engines have no connector."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.cluster import model_handover as handover
from pytest_kvconform.rigs.engine.messages import Snapshot
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed

FAMILIES = ("llama", "gemma3")
WITH_STATES = ("qwen3_5", "kimi_linear")
NO_HMA = "hybrid_allocator_stays_on"


@pytest.fixture(scope="module")
def case_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.wrong_connectors.store.stores", "engine", FAMILIES + WITH_STATES)
        yield runner
        assert runner.close() == []


@pytest.fixture
def run_cases(case_runner: CaseRunner, tmp_path: Path) -> Callable[..., CellRun]:
    """Run the cases of a cell on a store: run_cases("Right", "llama", variants="n64")."""

    def run(store: str, family: str = "llama", **more: str) -> CellRun:
        profile = "" if store == "ExampleConnector" else "store"
        config = json.dumps({"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}})
        return case_runner.run(store, family, profile=profile, config=config, **more)

    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_store_conforms(run_cases: Callable[..., CellRun], family: str) -> None:
    run = run_cases("Right", family)
    assert run.failed == ({NO_HMA} if family == "gemma3" else set()), run.findings
    assert "BLOCKED" not in run.outcomes.values()
    assert sum(evidence.bytes_moved for evidence in run.evidence.values()) > 100_000
    for scenario in ("two_at_once", "partial_hit", "chunked", "two_samples"):
        assert run.outcomes[f"outputs_match_the_oracle[{scenario}]"] == "PASS"


def test_a_miss_on_an_unlike_engine_is_right(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("Right", topology="P1D2", variants="two_at_once")
    assert set(run.outcomes.values()) == {"PASS", "NOT-APPLICABLE"}
    assert run.outcomes["attention_kv_arrives[two_at_once]"] == "NOT-APPLICABLE"


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_right_store_of_states_conforms(run_cases: Callable[..., CellRun], family: str) -> None:
    variants = "n129 two_at_once partial_hit chunked second_turn" if family == "qwen3_5" else ""
    run = run_cases("tests.wrong_connectors.store.states:WithStates", family, variants=variants)
    assert set(run.outcomes.values()) == {"PASS"}, run.outcomes
    states = [one for name, one in run.evidence.items() if name.startswith("recurrent_state_arrives")]
    assert states and all(one.bytes_moved for one in states)


def test_the_oracle_brings_no_state_of_other_tokens() -> None:
    """Two samples of a prompt have one prefill, and a store may load more of it for one of them."""
    state = {"layer": (np.zeros((2, 2)),)}
    none: dict[str, Any] = {"groups": (), "tables": (), "rows": {}, "present": {}}
    source, unused = Snapshot(request="p", tokens=64, state=state, **none), cast("Any", None)
    one = handover._Pass(unused, unused, handover.ORACLE, unused, "", brings=(64, 128, 0))
    assert handover._brought(one, 0, source) == source
    with pytest.raises(Blocked, match="P's state after 64 tokens, and D goes on after 128"):
        handover._brought(one, 1, source)
    assert handover._brought(one, 2, source) is None


def test_less_than_nothing_ends_an_engine(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("ExampleConnector", variants="n1")
    assert run.findings["completes[n1]"].happened == "D raised IndexError in step: index out of range in self"
