"""A line now and then about the whole run: cells done, time left, and what failed so far, by cause."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from pytest_kvconform import shards
from pytest_kvconform.plan import PlannedCase
from pytest_kvconform.report.answer import escaped
from pytest_kvconform.result import CaseResult, Cell, Outcome
from pytest_kvconform.verdict import cause_sentence

EVERY_S = 20.0  # between two lines
ENOUGH = 0.05  # the part of all costs that is done before a time is told
CAUSES, COLUMNS = 3, 60  # how many causes a line names, and how much of each


class Overview:
    """What is done of a run of several cells. Costs of cases are those by which runs are divided."""

    def __init__(
        self,
        planned: Sequence[PlannedCase],
        matrix: str,
        selected: Callable[[], Iterable[str]],
        now: Callable[[], float] = time.monotonic,
    ):
        """`selected`: ids of the planned cases that run. With xdist they are known by the first result."""
        self._planned, self._matrix, self._selected = planned, matrix, selected
        self._now, self._started = now, now()
        self._told = self._started
        self._failed, self._blocked = Counter[str](), 0

    @functools.cached_property
    def _left(self) -> dict[str, tuple[Cell, float]]:
        """Cases without a result: id -> cell and cost."""
        selected = set(self._selected())
        return {
            one.id: (one.cell, shards.seconds(one, self._matrix))
            for one in self._planned
            if one.id in selected
        }

    @functools.cached_property
    def _cost(self) -> float:
        return sum(cost for _, cost in self._left.values())

    @functools.cached_property
    def _cells(self) -> int:
        return len({cell for cell, _ in self._left.values()})

    def line(self, result: CaseResult) -> str:
        """Count a result. Return a line, or "" if the last line was printed less than EVERY_S ago."""
        cells, cost = self._cells, self._cost  # of the whole run, before the first result is taken out
        self._left.pop(result.id, None)
        if result.outcome in (Outcome.FAIL, Outcome.HARNESS):
            self._failed[cause_sentence(result)] += 1
        self._blocked += result.outcome is Outcome.BLOCKED
        if cells < 2 or not self._left or self._now() - self._told < EVERY_S:
            return ""
        self._told = self._now()
        done = cells - len({cell for cell, _ in self._left.values()})
        return f"{done} of {cells} cells done{self._time_left(cost)}{self._causes()}"

    def _time_left(self, whole: float) -> str:
        rest = sum(cost for _, cost in self._left.values())
        done = whole - rest
        if done <= ENOUGH * whole:
            return ""
        left = (self._told - self._started) * rest / done
        return f", about {left:.0f} s left" if left < 120 else f", about {left / 60:.0f} min left"

    def _causes(self) -> str:
        found = [f"{times} x {_short(cause)}" for cause, times in self._failed.most_common(CAUSES)]
        if (more := len(self._failed) - CAUSES) > 0:
            found.append(f"{more} more cause{'s' if more > 1 else ''}")
        failed = f"; {self._failed.total()} failed: {', '.join(found)}" if found else ""
        return failed + (f"; {self._blocked} blocked" if self._blocked else "")


def _short(sentence: str) -> str:
    line = escaped(sentence.partition("\n")[0])
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3].rstrip()}..."
