"""Connectors that look at vLLM's pool pass where blocks are given to other requests, and where ranks are
processes of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, fixtures, importable_from, must_be_installed

case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.right_connectors.reuse", "bytes", ("llama3_1_8b",), "full"),
    lambda case_runner: partial(
        case_runner.run,
        setup="b16",
        matrix="full",
        only=lambda planned: planned.module in ("bytes/start", "bytes/handover", "bytes/pool"),
    ),
    scope="module",
)

IN_FLIGHT = "saved_prompts_load_with_a_step_in_flight"
HOLDING = (IN_FLIGHT, "preempted_blocks_are_never_read_again")


@pytest.fixture(scope="module")
def scheduler_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.right_connectors.reuse", "protocol", ("llama3_1_8b",))
        yield runner
        assert runner.close() == []


@pytest.fixture
def run_holding(scheduler_runner: CaseRunner, tmp_path: Path) -> Callable[..., CellRun]:
    """Run the cases about blocks that are held on a store."""
    return partial(
        scheduler_runner.run,
        family="llama3_1_8b",
        setup="b16",
        profile="store",
        config=json.dumps({"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}),
        only=lambda planned: planned.case.name in HOLDING,
    )


def test_blocks_that_are_held_for_ever_are_named(run_holding: Callable[..., CellRun]) -> None:
    found = run_holding("HoldsBlocksForEver").findings[IN_FLIGHT]
    assert found.rule == "KV-FINISH-003" and "still have owners" in found.differs


@pytest.mark.parametrize(
    ("store", "save_delay", "rules"),
    [
        ("FindsLater", 0.2, set()),
        ("FindsMuchLater", 0.0, {"KV-HANDOVER-002"}),
        ("FindsNothing", 0.2, {"KV-HANDOVER-002"}),
    ],
)
def test_a_store_may_find_later_what_it_has_saved(
    case_runner: CaseRunner, store: str, save_delay: float, rules: set[str], tmp_path: Path
) -> None:
    run = case_runner.run(
        store,
        "llama3_1_8b",
        setup="b16",
        profile="same-engine",
        variants="n17 n55 reused two_at_once preempted_on_p hit1",
        config=json.dumps({"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}),
        declared={"save_delay": save_delay},
        only=lambda planned: planned.module in ("bytes/handover", "bytes/pool", "bytes/blocks"),
    )
    assert {finding.rule for finding in run.findings.values()} - {"KV-HANDOVER-003"} == rules, run.findings
    assert rules or run.outcomes["attention_kv_arrives[n55]"] == "PASS"


@pytest.mark.parametrize(("store", "found"), [("FindsLater", True), ("FindsNothing", False)])
def test_prompts_that_grow_may_be_found_later(
    scheduler_runner: CaseRunner, store: str, found: bool, tmp_path: Path
) -> None:
    run = scheduler_runner.run(
        store,
        "llama3_1_8b",
        setup="b16",
        profile="same-engine",
        config=json.dumps({"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}),
        declared={"save_delay": 0.2},
        only=lambda planned: planned.module.startswith("protocol/stores/"),
    )
    assert run.findings == {}
    assert any(evidence.external_tokens for evidence in run.evidence.values()) == found
