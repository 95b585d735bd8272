"""A second turn of hybrid models: what D has of the first one, and what it gets, are in the evidence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from model_matrix import load_families
from tests.helpers.case_runner import CellRun


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
@pytest.mark.parametrize("topology", ["P1D1", "P2D1"])
def test_d_hits_whole_blocks_and_gets_the_rest_and_the_state(
    run_cases: Callable[..., CellRun], family: str, topology: str
) -> None:
    run = run_cases("Right", family, topology, variants="second_turn", matrix="full")
    assert set(run.outcomes.values()) == {"PASS"}
    block = load_families()[family].block_size
    evidence = run.evidence["d_computes_only_missing_tokens[second_turn]"]
    assert evidence.notes["hit tokens"] == block
    assert evidence.notes["hit rate"] == round(block / (3 * block + 3), 3)
    assert evidence.external_tokens == 2 * block + 2
    arrived = (
        run.evidence[f"{name}[second_turn]"] for name in ("attention_kv_arrives", "recurrent_state_arrives")
    )
    assert evidence.notes["bytes pulled"] == sum(one.bytes_moved for one in arrived)
