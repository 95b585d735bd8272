"""After an engine has died of a case, fresh engines run the next ones, until it is known that all do."""

from __future__ import annotations

from collections.abc import Callable

from pytest_kvconform.rigs.engine.control import DEATHS
from tests.helpers.case_runner import CellRun

LENGTHS = "n1 n31 n33 n63 n64 n65"


def test_fresh_engines_run_the_cases_after_a_death(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("RaisesInShortLoad", "llama", variants="n1 n63 n200 two_at_once")
    assert run.failed == {"completes[n1]"}, run.findings
    assert "start_load_kv" in run.findings["completes[n1]"].happened
    blocked = {name for name, outcome in run.outcomes.items() if outcome == "BLOCKED"}
    assert blocked
    assert all("[n1]" in name for name in blocked), blocked
    assert run.outcomes["outputs_match_the_oracle[n200]"] == "PASS"
    assert run.outcomes["no_threads_ports_or_processes_left[two_at_once]"] == "PASS"


def test_a_cell_whose_engines_die_again_and_again_is_given_up(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("RaisesInLoad", "llama", variants=LENGTHS)
    ended = {name: outcome for name, outcome in run.outcomes.items() if name.startswith("completes[")}
    assert list(ended.values()) == ["FAIL"] * DEATHS + ["BLOCKED"] * (len(ended) - DEATHS)
    assert len(ended) > DEATHS
    assert run.reasons[list(ended)[-1]].startswith(
        "an engine of llama-P1D1 failed before: D raised RuntimeError in start_load_kv"
    )
