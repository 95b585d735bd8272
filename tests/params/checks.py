"""The check of one wrong scheduler half, and the modules of cases that these tests run."""

from __future__ import annotations

import re
from collections.abc import Callable

from pytest_kvconform.plan import PlannedCase
from tests.helpers.case_runner import CellRun
from tests.helpers.wrong import Wrong

MODULES = (
    "protocol/kv_transfer_params",
    "protocol/prefix_cache_hits",
    "protocol/aborts",
    "protocol/multi_connector",
    "protocol/stores/saved_prompts",
    "protocol/multi_connector_halves",
)


PARAMS, HITS, ABORTS, MULTI, STORES, HALVES = ((module,) for module in MODULES)


def of(modules: tuple[str, ...]) -> Callable[[PlannedCase], bool]:
    return lambda planned: planned.module in modules


def deviations(run: CellRun, wrong: Wrong) -> list[str]:
    """What differs from this: exactly the cases of the pattern fail, with the rule and the message."""
    [(case, says)] = wrong.fails.items()
    due = {
        name
        for name, outcome in run.outcomes.items()
        if outcome != "NOT-APPLICABLE" and re.fullmatch(case, name)
    }
    found = [f"{result.id}: {result.reason}" for result in run.results if result.outcome == "HARNESS"]
    found += [f"{name} found it besides" for name in run.failed - due] + [
        f"{name} did not find it" for name in due - run.failed
    ]
    for name, finding in run.findings.items():
        one_line = "\n" not in finding.happened and len(finding.happened) < 400
        if finding.rule != wrong.rules or not one_line or not re.search(says, finding.happened):
            found.append(f"{name}: {finding}")
    return found if due else [f"no case is called {case}"]
