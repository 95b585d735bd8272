"""Right connectors pass every case of the engine tier."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.case_runner import CellRun

FEW = "n1 n63 n64 n65 two_at_once partial_hit abort_loading"
RIGHT = [
    ("PrintsBinary", "llama", "n1 n64 n200 two_at_once full_hit abort_waiting"),
    ("BacksOff", "gemma3", ""),
    ("Right", "qwen3_5", FEW),
    ("LayerWise", "qwen3_5", FEW),
    ("Right", "kimi_linear", "n1 n2 n129 two_at_once partial_hit second_turn abort_loading"),
]


@pytest.mark.parametrize(
    ("connector", "family", "variants"), RIGHT, ids=[f"{row[0]}-{row[1]}" for row in RIGHT]
)
def test_a_right_connector_passes_every_case(
    run_cases: Callable[..., CellRun], connector: str, family: str, variants: str
) -> None:
    run = run_cases(connector, family, variants=variants)
    assert set(run.outcomes.values()) == {"PASS"}
    assert (run.verdict.word, run.verdict.exit_code) == ("CONFORMS", 0)
