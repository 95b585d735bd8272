"""A diagnosis names the cause that the words prove: not yet computed, overwritten since, or another's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures

DENSE, ARRIVES = "llama3_1_8b", "attention_kv_arrives"
case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.causes.connectors", "bytes", (DENSE,), "full"),
    lambda case_runner: partial(case_runner.run, setup="b16", matrix="full", config=""),
    scope="module",
)
TOO_EARLY = (
    "the right remote blocks were read, but before P had computed what belongs there: this explains all"
)
TOO_LATE = (
    "the right remote blocks were read, but after they had been freed and overwritten: this explains all"
)
CAUSES = [
    ("SendsWhatWasThere", "n55", TOO_EARLY),
    ("SendsWhatWasThere", "reused", TOO_EARLY),
    ("KeepsNothing", "reused", TOO_LATE),
    ("SendsTheLast", "two_at_once", "rows of another request (owner 1)"),
    ("WritesNothing", "n55", "no byte of "),
]


@pytest.mark.parametrize(("connector", "variant", "says"), CAUSES)
def test_each_cause_has_a_sentence_of_its_own(
    run_cases: Callable[..., CellRun], connector: str, variant: str, says: str
) -> None:
    run = run_cases(connector, DENSE, variants=variant)
    found = run.findings[f"{ARRIVES}[{variant}]"].diagnosis
    assert found.startswith(says), found


@pytest.mark.parametrize("variant", ["n55", "reused", "two_at_once"])
def test_a_right_connector_of_this_kind_passes(run_cases: Callable[..., CellRun], variant: str) -> None:
    run = run_cases("Right", DENSE, variants=variant)
    assert not run.failed, run.findings
    assert run.outcomes[f"{ARRIVES}[{variant}]"] == "PASS"
