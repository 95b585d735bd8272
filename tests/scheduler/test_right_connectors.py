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
