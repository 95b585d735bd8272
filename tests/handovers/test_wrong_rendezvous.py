"""Mistakes in the hand-over rendezvous are found, each with the words that name it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial

import pytest

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures
from tests.helpers.wrong import Wrong, on

PARAMS = "protocol/kv_transfer_params"
CASES = {
    "attention_kv_arrives[two_at_once]": ("bytes", "bytes/pool"),
    "p_survives_corrupted_params[missing]": ("protocol", PARAMS),
    "corrupted_params_fail_only_their_request[missing]": ("protocol", PARAMS),
}
case_runner, run_case = fixtures(
    lambda: CaseRunner("tests.handovers.wrong_rendezvous", "bytes", ("llama3_1_8b",), "quick"),
    lambda case_runner: partial(_run, case_runner),
    scope="module",
)


def _run(case_runner: CaseRunner, connector: str, case: str) -> CellRun:
    runner = copy.copy(case_runner)
    runner.tier, module = CASES[case]
    function, _, variant = case.rstrip("]").partition("[")
    return runner.run(
        connector,
        "llama3_1_8b",
        setup="b16",
        declared={"handover": "rendezvous"},
        variants=variant,
        only=lambda planned: planned.module == module and f"::{function}[" in planned.id,
    )


@pytest.mark.parametrize("case", CASES)
def test_a_right_one_passes(run_case: Callable[..., CellRun], case: str) -> None:
    assert run_case("Right", case).outcomes == {case: "PASS"}


WRONG = [
    Wrong(
        "MeetsTheNewest",
        on(
            "attention_kv_arrives[two_at_once]",
            r"KV-BYTES-001 .*\| rows of another request \(owner 1\) in all \d+ words",
        ),
    ),
    Wrong(
        "NeedsTheId",
        on(
            "p_survives_corrupted_params[missing]",
            "KV-PARAMS-005 with transfer_id missing: request_finished_all_groups raised KeyError",
        ),
    ),
    Wrong(
        "TrustsTheProxy",
        on(
            "corrupted_params_fail_only_their_request[missing]",
            "KV-PARAMS-002 with transfer_id missing: the request waits for ever: its load was announced, and",
        ),
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_one_is_found(run_case: Callable[..., CellRun], wrong: Wrong) -> None:
    [(case, says)] = wrong.fails.items()
    finding = run_case(wrong.connector, case).findings[case]
    found = f"{finding.rule} {finding.happened} | {finding.diagnosis}"
    assert re.match(says, found), found
