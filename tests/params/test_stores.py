"""Mistakes of stores are found by the cases of their rules, without a transfer; a right store passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.case_runner import CellRun
from tests.helpers.wrong import Wrong, on

from .checks import STORES, deviations, of

WRONG = [
    Wrong(
        "AnnouncesTheRest",
        on(
            r"growing_prompts_can_be_loaded\[forgotten\]",
            r"tokens, \d+ of which were ever computed, \d+ were announced",
        ),
        rules="KV-STORE-001",
    ),
    Wrong(
        "CountsTokens",
        {r"unsaved_prompts_match_nothing\[(?!nothing)\w+\]": r"no engine has saved a block"},
        rules="KV-STORE-002",
    ),
    Wrong(
        "CountsQuestions",
        {r"repeated_lookup_returns_the_same": r"called four times for one request"},
        rules="KV-STORE-003",
    ),
]


def store_config(folder: Path) -> str:
    return f'{{"kv_connector_extra_config": {{"shared_storage_path": "{folder}"}}}}'


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_mistake_of_a_store_is_found_by_the_cases_of_its_rule(
    run_cases: Callable[..., CellRun], wrong: Wrong, tmp_path: Path
) -> None:
    run = run_cases(
        wrong.connector, **wrong.cell, only=of(STORES), profile="store", config=store_config(tmp_path)
    )
    assert deviations(run, wrong) == []


def test_a_right_store_passes(run_cases: Callable[..., CellRun], tmp_path: Path) -> None:
    run = run_cases("Store", "llama3_1_8b", only=of(STORES), profile="store", config=store_config(tmp_path))
    assert set(run.outcomes.values()) == {"PASS"}, run.findings
    served = run.evidence["growing_prompts_can_be_loaded[forgotten]"].external_tokens
    assert served > 100, "nothing was loaded"


def test_a_store_that_announces_nothing_passes_nothing_about_announcements(
    run_cases: Callable[..., CellRun], tmp_path: Path
) -> None:
    run = run_cases("Silent", "llama3_1_8b", only=of(STORES), profile="store", config=store_config(tmp_path))
    assert run.failed == set()
    unsaid = {name for name, outcome in run.outcomes.items() if outcome == "NOT-APPLICABLE"}
    assert unsaid == {"growing_prompts_can_be_loaded[forgotten]", "repeated_lookup_returns_the_same"}


def test_vllms_example_of_a_store_announces_what_it_has_not(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("ExampleConnector", "llama3_1_8b", only=of(STORES))
    assert run.failed == {
        "growing_prompts_can_be_loaded[kept]",
        "growing_prompts_can_be_loaded[forgotten]",
    }
    assert "returned (-16, False)" in run.findings["growing_prompts_can_be_loaded[kept]"].happened
    assert (
        "start_load_kv raised FileNotFoundError"
        in run.findings["growing_prompts_can_be_loaded[forgotten]"].happened
    )
