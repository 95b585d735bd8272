"""A hook that stands still is waited for twice in a module, and no more."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from tests.helpers.case_runner import CellRun
from tests.helpers.wrong import DENSE, Wrong
from tests.wrong_connectors.table.scheduler import THEMES

SHORT = 0.1  # of deadlines: the test waits for one of them


def test_a_hook_that_stands_still_is_waited_for_twice_in_a_module_and_no_more(
    run_cases: Callable[..., CellRun],
) -> None:
    wrong = Wrong("StandsStill", {"every_hook_returns_soon[loading]": ""})
    run = run_cases("StandsStill", DENSE, scale=SHORT, only=THEMES[0].selects(wrong, at_night=True))
    said = [finding.happened for finding in run.findings.values()]
    hung = Counter(result.id.split("::")[1] for result in run.results if result.finding)
    assert len(hung) <= 3 and max(hung.values()) == 2 and "BLOCKED" in run.outcomes.values()
    for happened in said:
        assert re.search(
            r"did not end within \S+ s, in update_state_after_alloc \(failures\.py:\d+\)", happened
        )
