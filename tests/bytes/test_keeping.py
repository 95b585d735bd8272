"""A connector whose P keeps blocks is said to keep blocks, and nothing else.

P must have room for the longest prompt of a cell, whatever it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pytest_kvconform.rigs.cluster.release import is_full
from tests.helpers.case_runner import CellRun


@pytest.mark.parametrize(
    ("free_p", "free_d", "needs", "full"),
    [(60, 100, 0, False), (49, 100, 0, True), (100, 49, 0, True), (60, 100, 60, False), (60, 100, 61, True)],
)
def test_what_is_kept_fills_an_engine(free_p: int, free_d: int, needs: int, full: bool) -> None:
    kept = tuple(SimpleNamespace(free_blocks=free, total_blocks=100) for free in (free_p, free_d))
    assert is_full(SimpleNamespace(kept=kept), needs) is full  # type: ignore[arg-type]


def test_an_engine_that_keeps_nothing_is_not_full() -> None:
    assert not is_full(SimpleNamespace(kept=None), 100)  # type: ignore[arg-type]


def test_long_prompts_have_room_beside_blocks_that_are_kept(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("KeepsBlocks", "gemma3_1b", variants="n2 n15 n16 n17 n31 n32 n33 n55 n512")
    assert run.outcomes["completes[n512]"] == "PASS"
    assert {name.partition("[")[0] for name in run.failed} == {"all_blocks_are_freed"}
