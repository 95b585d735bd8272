"""The check of one wrong scheduler half: which cases find it, and which rules they name."""

from __future__ import annotations

import re
from collections.abc import Callable

from pytest_kvconform.plan import PlannedCase
from tests.helpers.case_runner import CellRun
from tests.helpers.wrong import Wrong, modules_about

MODULES = (
    "protocol/hooks",
    "protocol/matched_tokens",
    "protocol/connector_metadata",
    "protocol/request_finished",
    "protocol/loads",
)


def chosen(wrong: Wrong, modules: tuple[str, ...] = MODULES) -> Callable[[PlannedCase], bool]:
    """Of every case of these modules the first variant, and those that are named."""
    first: dict[str, str] = {}

    def choose(planned: PlannedCase) -> bool:
        name, variant = planned.case.name, str(planned.variant)
        return planned.module in modules and (
            first.setdefault(name, variant) == variant or f"{name}[{variant}]" in wrong.fails
        )

    return choose


def check_mistake(run_cases: Callable[..., CellRun], wrong: Wrong, everywhere: bool) -> None:
    """The named cases fail with the first rule of `wrong.rules`.

    Other cases may fail, with rules of `wrong.rules`. `everywhere`: all modules run, also where it has one
    rule alone.
    """
    several = everywhere or " " in wrong.rules
    modules = MODULES if several else modules_about(wrong.fails, MODULES)
    run = run_cases(wrong.connector, **wrong.cell, only=chosen(wrong, modules))
    assert "HARNESS" not in run.outcomes.values(), [
        result.reason for result in run.results if result.outcome == "HARNESS"
    ]
    assert wrong.fails.keys() <= run.failed, f"{wrong.fails.keys() - run.failed} did not find it"
    found = {(finding.rule, finding.happened) for finding in run.findings.values()}
    assert {rule for rule, _ in found} == set(wrong.rules.split()), found
    for case, pattern in wrong.fails.items():
        assert run.findings[case].rule == wrong.rules.split()[0]
        assert re.search(pattern, run.findings[case].happened), run.findings[case].happened
    assert all("\n" not in said and len(said) < 500 for _, said in found)
    assert (run.verdict.word, run.verdict.exit_code) == ("VIOLATES", 1)
