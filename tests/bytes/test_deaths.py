"""After a byte engine has died of a transfer, fresh ones run the next, until it is known that all die."""

from __future__ import annotations

from collections.abc import Callable

from pytest_kvconform.rigs.engine.control import DEATHS
from tests.helpers.case_runner import CellRun

LENGTHS = "n2 n15 n16 n17 n31 n55"


def completed(run: CellRun) -> dict[str, str]:
    return {name: outcome for name, outcome in run.outcomes.items() if name.startswith("completes[")}


def test_fresh_engines_run_the_transfers_after_a_death(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("RaisesInShortLoad", "llama3_1_8b", variants="n2 n16 n55")
    assert completed(run) == {"completes[n2]": "FAIL", "completes[n16]": "FAIL", "completes[n55]": "PASS"}
    assert run.outcomes["attention_kv_arrives[n55]"] == "PASS"


def test_a_cell_whose_engines_die_again_and_again_is_given_up(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("RaisesInLoad", "llama3_1_8b", variants=LENGTHS)
    ended = completed(run)
    assert list(ended.values()) == ["FAIL"] * DEATHS + ["BLOCKED"] * (len(ended) - DEATHS), run.findings
    assert len(ended) > DEATHS
    assert run.reasons[list(ended)[-1]].startswith("depends on kv::bytes/handover::completes[llama3_1_8b-")
