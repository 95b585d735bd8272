"""Stores on real engines: P saves, D finds it, and the oracle's engines have no connector."""

from __future__ import annotations

import functools
import json
import re
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
from tests.helpers.wrong import Wrong

HERE = Path(__file__).parent
FAMILIES = ("llama", "gemma3")
WITH_STATES = ("qwen3_5", "kimi_linear")
NO_HMA = "hybrid_allocator_stays_on"
MOVED = r"token is (off by|mixed up)"  # rows of equal words make the distance ambiguous


@pytest.fixture(scope="module")
def case_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(HERE, ROOT):
        runner = CaseRunner("stores", "engine", FAMILIES + WITH_STATES)
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


mistake = functools.partial(Wrong, variants="two_at_once")
WRONG = [
    mistake("NeverSaves", {"d_computes_only_missing_tokens": "announced nothing of a prompt that was saved"}),
    mistake("LoadsNothing", {"attention_kv_arrives": r"tokens 0-95 of all 4 layers was never written"}),
    mistake("LoadsLateByOne", {"attention_kv_arrives": MOVED}),
    mistake(
        "WrongLayer", {"attention_kv_arrives": r"layers\.0\.self_attn\.attn holds rows of model\.layers\.1\."}
    ),
    # rows of another prompt; whether some of its tokens are in this one, too, is chance
    mistake(
        "FirstBlockOnly", {"attention_kv_arrives": rf"of 432 wrong rows: {MOVED}|tokens 69-95 .* nowhere"}
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_store_fails(run_cases: Callable[..., CellRun], wrong: Wrong) -> None:
    run = run_cases(wrong.connector, variants=wrong.variants)
    [(case, pattern)] = wrong.fails.items()
    assert case in {name.partition("[")[0] for name in run.failed}
    finding = next(run.findings[name] for name in run.failed if name.startswith(case))
    assert re.search(pattern, finding.diagnosis)


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_right_store_of_states_conforms(run_cases: Callable[..., CellRun], family: str) -> None:
    variants = "n129 two_at_once partial_hit chunked second_turn" if family == "qwen3_5" else ""
    run = run_cases("states:WithStates", family, variants=variants)
    assert set(run.outcomes.values()) == {"PASS"}, run.outcomes
    states = [one for name, one in run.evidence.items() if name.startswith("recurrent_state_arrives")]
    assert states and all(one.bytes_moved for one in states)


STATE, OUTPUT = "recurrent_state_arrives[n129]", "outputs_match_the_oracle[n129]"
UNOWNED = "unowned_blocks_are_unchanged[{}]"
WRONG_WITH_STATES = [
    Wrong("ForgetsTheState", {STATE: "recurrent state never written", OUTPUT: ""}, variants="n129"),
    Wrong(
        "FirstSlot",
        {
            STATE: "recurrent state never written",
            OUTPUT: "",
            UNOWNED.format("n129"): "block 0 is the null block",
        },
        variants="n129",
    ),
    Wrong("NextLayer", {STATE: "recurrent state garbled", OUTPUT: ""}, variants="n129"),
    Wrong("CopiesEveryBlock", {UNOWNED.format("chunked"): "block 0 is the null block"}, variants="chunked"),
    Wrong(
        "LoadsForTheSecond",
        {"d_computes_only_missing_tokens[two_samples]": "announced nothing of a prompt that was saved"},
        variants="two_samples",
    ),
]


@pytest.mark.parametrize("wrong", WRONG_WITH_STATES, ids=str)
def test_a_wrong_store_of_states_fails(run_cases: Callable[..., CellRun], wrong: Wrong) -> None:
    run = run_cases(f"states:{wrong.connector}", "qwen3_5", variants=wrong.variants)
    assert run.failed == set(wrong.fails)
    for case, words in wrong.fails.items():
        assert re.search(words, f"{run.findings[case].happened} {run.findings[case].diagnosis}")


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
