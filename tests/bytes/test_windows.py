"""Without vLLM's hybrid memory allocator layers with a sliding window keep all tokens, and need them all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_kvconform.features import cell_facts
from pytest_kvconform.result import Cell
from tests.helpers.case_runner import CellRun

SHORT, LONG = "n17", "n528"  # tokens; the window has 512


@pytest.mark.parametrize(
    ("connector", "setup", "failed"),
    [
        ("ReferenceConnector", "no_hma", set()),
        ("Right", "no_hma", set()),
        ("ClipsEachWindow", "no_hma", {f"attention_kv_arrives[{LONG}]"}),
        ("ClipsEachWindow", "b16", set()),
    ],
)
def test_a_connector_that_loads_the_window_alone(
    run_cases: Callable[..., CellRun], connector: str, setup: str, failed: set[str]
) -> None:
    run = run_cases(connector, "gemma3_1b", setup=setup, variants=f"{SHORT} {LONG} hit33", matrix="full")
    assert run.failed == failed
    assert run.outcomes[f"attention_kv_arrives[{SHORT}]"] == "PASS"
    assert ("sliding_window_is_complete[n17]" in run.outcomes) == (setup != "no_hma")


@pytest.mark.parametrize("setup", ["b16", "b16x64"])
def test_nothing_is_freed_before_a_window_for_a_connector_without_hma(
    run_cases: Callable[..., CellRun], setup: str
) -> None:
    name, variants = "tests.wrong_connectors.engine:NoHMA", f"{SHORT} {LONG}"
    run = run_cases(name, "gemma3_1b", setup=setup, variants=variants, matrix="full")
    assert run.outcomes[f"attention_kv_arrives[{LONG}]"] == "PASS"
    assert run.outcomes[f"sliding_window_is_complete[{LONG}]"] == "NOT-APPLICABLE"
    assert "NoHMA lacks HMA" in run.reasons[f"sliding_window_is_complete[{LONG}]"]


def test_layers_with_a_window_are_of_full_attention_without_it() -> None:
    facts = {setup: cell_facts(Cell("gemma3_1b", "P1D1", setup)) for setup in ("b16", "no_hma")}
    assert facts == {"b16": {"full-attention", "sliding-window"}, "no_hma": {"full-attention"}}
