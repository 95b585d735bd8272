"""Plans of cells are made once, and anew where a test gives them the rules of another minor of vLLM."""

from __future__ import annotations

import pytest

from pytest_kvconform import plan
from tests.helpers.case_runner import _plan

CELL = ("protocol",), ("llama3_1_8b",), ("P1D1",), "quick"
SINCE_33 = "protocol/steps/announced_tokens"


def test_a_plan_is_of_the_minor_that_the_test_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = []
    for minor in ("0.32.0", "0.33.0"):
        monkeypatch.setattr(plan, "version", lambda *names, minor=minor: minor)
        modules.append({planned.module for planned in _plan(*CELL, plan.version)})
        assert _plan(*CELL, plan.version) is _plan(*CELL, plan.version)
    assert [SINCE_33 in names for names in modules] == [False, True]
