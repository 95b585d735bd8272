"""A line now and then about the whole run: cells done, time left, and what failed so far, by cause."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from pytest_kvconform import shards
from pytest_kvconform.plan import PlannedCase
from pytest_kvconform.result import CaseResult, Outcome
from pytest_kvconform.verdict import cause_sentence

EVERY_S = 20.0  # between two lines
ENOUGH = 0.05  # the part of all costs that is done before a time is told
CAUSES, COLUMNS = 3, 60  # how many causes a line names, and how much of each


class Overview:
    """What is done of a run of several cells. Costs of cases are those by which runs are divided."""

    def __init__(
        self, planned: Sequence[PlannedCase], matrix: str, now: Callable[[], float] = time.monotonic
    ):
        self._now, self._started = now, now()
        self._told = self._started
        self._left = {one.id: (one.cell, shards.seconds(one, matrix)) for one in planned}
        self._cost = self._cost_left = sum(cost for _, cost in self._left.values())
        self._cases_left = Counter(cell for cell, _ in self._left.values())
        self._cells = len(self._cases_left)
        self._failed, self._blocked = Counter[str](), 0

    def line(self, result: CaseResult) -> str:
        """Count a result. Return a line, or "" if the last line was printed less than EVERY_S ago."""
        cell, cost = self._left.pop(result.id, (None, 0.0))
        if cell is not None:
            self._cases_left[cell] -= 1
            self._cost_left -= cost
        if result.outcome in (Outcome.FAIL, Outcome.HARNESS):
            self._failed[cause_sentence(result)] += 1
        self._blocked += result.outcome is Outcome.BLOCKED
        if self._cells < 2 or not self._left or self._now() - self._told < EVERY_S:
            return ""
        self._told = self._now()
        done = sum(not left for left in self._cases_left.values())
        return f"{done} of {self._cells} cells done{self._time_left()}{self._causes()}"

    def _time_left(self) -> str:
        done = self._cost - self._cost_left
        if done < ENOUGH * self._cost:
            return ""
        left = (self._told - self._started) * self._cost_left / done
        return f", about {left:.0f} s left" if left < 120 else f", about {left / 60:.0f} min left"

    def _causes(self) -> str:
        found = [f"{times} × {_short(cause)}" for cause, times in self._failed.most_common(CAUSES)]
        if (more := len(self._failed) - CAUSES) > 0:
            found.append(f"{more} more cause{'s' if more > 1 else ''}")
        failed = f"; {self._failed.total()} failed: {', '.join(found)}" if found else ""
        return failed + (f"; {self._blocked} blocked" if self._blocked else "")


def _short(sentence: str) -> str:
    line = sentence.partition("\n")[0]
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3].rstrip()}..."
