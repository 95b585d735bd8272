"""Connectors that look at vLLM's pool pass where blocks are given to other requests, and where ranks are
processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures

case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.right_connectors.reuse", "bytes", ("llama3_1_8b",), "full"),
    lambda case_runner: partial(
        case_runner.run,
        setup="b16",
        matrix="full",
        only=lambda planned: planned.module in ("bytes/start", "bytes/handover", "bytes/pool"),
    ),
)


def test_freed_blocks_may_be_read_until_another_request_gets_them(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("SavesBeforeReuse", "llama3_1_8b", "P1D1", "n55 reused two_at_once")
    assert len(run.results) > 15 and {name: run.findings.get(name) for name in _not_passed(run)} == {}


def test_the_size_of_the_pool_is_known_to_every_rank(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("CountsBlocks", "llama3_1_8b", "P2D2", "n55")
    assert len(run.results) > 5 and {name: run.findings.get(name) for name in _not_passed(run)} == {}


def _not_passed(run: CellRun) -> list[str]:
    return [name for name, outcome in run.outcomes.items() if outcome != "PASS"]
