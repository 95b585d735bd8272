"""Right scheduler halves pass every case, and every rule of the cases has a mistake that only it names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_kvconform.plan import load_module
from tests.helpers.case_runner import CellRun

from . import test_finished_and_loads, test_matched_and_metadata
from .checks import MODULES


def test_every_rule_of_these_cases_has_a_mistake_that_only_it_names() -> None:
    rules = {case.rule for module in MODULES for case in load_module(module)[1]}
    every = (*test_matched_and_metadata.WRONG, *test_finished_and_loads.WRONG)
    # With too large a count every load waits for ever, so other rules name it, too. Too small a one is a
    # matter of KV-RANK-001.
    assert rules - {wrong.rules for wrong in every} == {"KV-LOAD-002"}
    assert rules <= {rule for wrong in every for rule in wrong.rules.split()}


@pytest.mark.parametrize(
    ("connector", "geometry", "topology"),
    [
        ("Right", "llama3_1_8b", "P1D1"),
        ("SureLater", "llama3_1_8b", "P1D1"),
        ("SureLater", "gemma3_1b", "P1D1"),
        ("Right", "qwen3_5_35b_a3b", "P1D2"),
        ("NixlConnector", "llama3_1_8b", "P2D1"),
    ],
)
def test_a_right_connector_passes_every_case(
    run_cases: Callable[..., CellRun], connector: str, geometry: str, topology: str
) -> None:
    run = run_cases(connector, geometry, topology, only=lambda planned: planned.module in MODULES)
    assert {name: outcome for name, outcome in run.outcomes.items() if outcome != "PASS"} == {}
    assert len(run.outcomes) > 100
    assert (run.verdict.word, run.verdict.exit_code) == ("CONFORMS", 0)


def test_one_rank_may_report_for_all(run_cases: Callable[..., CellRun]) -> None:
    """Cases in which one rank after the other reports do not apply, and all others do."""
    run = run_cases(
        "OneRankReports",
        "qwen3_5_35b_a3b",
        "P2D2",
        only=lambda planned: planned.module in MODULES and planned.case.rule.startswith("KV-LOAD-"),
    )
    in_turn = ("load_ends_with_the_last_rank", "send_ends_with_the_last_rank", "load_fails_if_one_rank_fails")
    expected = {
        name: "NOT-APPLICABLE" if name.startswith(in_turn) or "[one_rank]" in name else "PASS"
        for name in run.outcomes
    }
    assert run.outcomes == expected
    assert "aborted_load_frees_blocks_after_its_report[begun]" in expected
    assert list(expected.values()).count("NOT-APPLICABLE") == 8
