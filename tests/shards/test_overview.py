"""The line about the whole run: what is done, how long the rest takes, and what failed so far."""

from __future__ import annotations

import itertools
import re

import pytest

from pytest_kvconform import shards
from pytest_kvconform.plan import PlannedCase, make_plan
from pytest_kvconform.pytest_hooks.overview import EVERY_S, Overview
from pytest_kvconform.result import CaseResult, Finding, Outcome
from pytest_kvconform.settings import Settings


@pytest.fixture(scope="module")
def planned() -> tuple[PlannedCase, ...]:
    """All cases of two cells."""
    settings = Settings(connector="m:C", tier=("bytes",), family=("gemma3_1b",), topology=("P1D1", "P1D2"))
    return make_plan(settings, ()).selected


def result(one: PlannedCase, outcome: Outcome = Outcome.PASS, cause: str = "") -> CaseResult:
    finding = Finding(rule=one.case.rule, happened=cause) if cause else None
    return CaseResult(id=one.id, rule=one.case.rule, outcome=outcome, finding=finding)


def test_the_time_left_follows_from_the_costs(planned: tuple[PlannedCase, ...]) -> None:
    costs = [shards.seconds(one, "quick") for one in planned]
    seconds = 0.0
    overview, lines = Overview(planned, "quick", lambda: [one.id for one in planned], lambda: seconds), []
    for one, cost in zip(planned, costs, strict=True):
        seconds += 1000 * cost / sum(costs)  # the run takes 1000 s, as the costs say
        lines.append((seconds, overview.line(result(one))))
    told = [(at, line) for at, line in lines if line]
    assert 15 < len(told) < 1000 / EVERY_S and lines[-1][1] == ""  # the end says everything
    assert all(later - before >= EVERY_S for (before, _), (later, _) in itertools.pairwise(told))
    for at, line in told:
        match = re.fullmatch(r"\d of \d cells done(?:, about (\d+) (s|min) left)?", line)
        assert match, line
        assert (match[1] is not None) == (at > 50)
        if match[1]:
            unit, slack = {"s": (1, 0.6), "min": (60, 31)}[match[2]]
            assert abs(int(match[1]) * unit - (1000 - at)) < slack, line


def test_failures_are_counted_by_cause(planned: tuple[PlannedCase, ...]) -> None:
    seconds, causes = 0.0, [*["bytes\nof layer 3"] * 3, *["d" * 80] * 2, "once", "twice", "thrice"]
    overview = Overview(planned, "quick", lambda: [one.id for one in planned], lambda: seconds)
    for one, cause in zip(planned, causes, strict=False):
        assert overview.line(result(one, Outcome.FAIL, cause)) == ""
    seconds = EVERY_S
    line = overview.line(result(planned[len(causes)], Outcome.BLOCKED))
    long = "d" * 57 + "..."
    assert line.endswith(f"; 8 failed: 3 x bytes, 2 x {long}, 1 x once, 2 more causes; 1 blocked")


def test_a_case_that_pytest_leaves_out_does_not_count(planned: tuple[PlannedCase, ...]) -> None:
    first, second = (
        [one for one in planned if one.cell == cell] for cell in dict.fromkeys(one.cell for one in planned)
    )
    chosen, seconds = [*first[:2], second[0]], 0.0
    overview = Overview(planned, "quick", lambda: [one.id for one in chosen], lambda: seconds)
    seconds = EVERY_S
    assert overview.line(result(chosen[0])).startswith("0 of 2 cells done, about ")
    seconds = 2 * EVERY_S
    assert overview.line(result(chosen[1])).startswith("1 of 2 cells done, about ")
    seconds = 3 * EVERY_S
    assert overview.line(result(chosen[2])) == ""  # the last one


def test_a_run_of_one_cell_has_no_line(planned: tuple[PlannedCase, ...]) -> None:
    alone = [one for one in planned if one.cell == planned[0].cell]
    seconds = 0.0
    overview = Overview(planned, "quick", lambda: [one.id for one in alone], lambda: seconds)
    seconds = EVERY_S
    assert overview.line(result(alone[0])) == ""
