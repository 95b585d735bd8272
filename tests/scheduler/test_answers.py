"""Connectors that answer later than at once, or more often than once, pass the cases that could alarm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from pytest_kvconform.subject import resolve
from tests.helpers import case_runner as runner_of_cases
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures

case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.right_connectors.answers", "protocol", ("llama3_1_8b",), "full"),
    lambda case_runner: partial(case_runner.run, setup="b16", matrix="full"),
    scope="module",
)


@pytest.mark.parametrize(
    ("connector", "outcome"), [("workers:MeetsFirst", "BLOCKED"), ("workers:SaysNothing", "FAIL")]
)
def test_an_answer_may_wait_for_workers_that_cannot_run_here(
    run_cases: Callable[..., CellRun], monkeypatch: pytest.MonkeyPatch, connector: str, outcome: str
) -> None:
    monkeypatch.setattr(
        runner_of_cases, "resolve", lambda settings: replace(resolve(settings), requires_device="cuda")
    )
    case = "none_is_followed_by_an_answer"
    run = run_cases(
        f"tests.right_connectors.{connector}",
        "llama3_1_8b",
        variants="handed_over",
        only=lambda planned: planned.case.name == case,
    )
    assert run.outcomes == {f"{case}[handed_over]": outcome}
    for reason in run.reasons.values():
        assert reason.endswith(
            f"{connector[8:]} moves bytes only on cuda, and the installed vLLM runs on cpu"
        )
