"""Mistakes in vLLM's step loop are found: steps in flight, slow hooks, tails and events."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest

from pytest_kvconform.plan import load_module
from tests.helpers.case_runner import CellRun
from tests.helpers.wrong import Wrong, on

MODULES = tuple(
    f"protocol/steps/{name}" for name in ("asynchronous_scheduling", "hook_durations", "optional_hooks")
)
STATES = {"family": "qwen3_5_35b_a3b", "topology": "P2D2"}
ENDS, DURATIONS = "requests_end_with_a_step_in_flight", "step_loop_hooks_return_at_once"
IN_FLIGHT = r"with a step in flight between schedule\(\) and update_from_output\(\), "
mistake = partial(Wrong, matrix="quick")
WRONG = [
    mistake(
        "NotesTheLastStep",
        on(
            f"{ENDS}[d-length] {ENDS}[p-length]",
            IN_FLIGHT + r"request_finished_all_groups raised KeyError: 'cmpl-\w+-0000' \(steps\.py:\d+\)",
        )
        | on("mixed_requests_with_a_step_in_flight", IN_FLIGHT),
        rules="KV-ASYNC-001",
        variants="d-length p-length P",
    ),
    mistake(
        "HandsOverTheLastStep",
        {
            f"{ENDS}[p-length]": IN_FLIGHT
            + r"blocks were kept at the end of 0 requests, and otherwise of 1; "
            r"0 requests were handed over, and otherwise 1$",
            f"{ENDS}[d-length]": IN_FLIGHT + r".* returns no kv_transfer_params for a request that asks",
        },
        rules="KV-ASYNC-001",
        variants="d-length p-length",
    ),
    mistake(
        "KeepsWhatStillRuns",
        on(f"{ENDS}[d-stop]", IN_FLIGHT + "blocks were kept at the end of 2 requests, and otherwise of 1$"),
        rules="KV-ASYNC-001",
        variants="d-stop",
        matrix="full",
    ),
    mistake(
        "AsksItsServer",
        on(
            f"{DURATIONS}[scheduler]",
            r"build_connector_meta took (49|5\d) ms or more in each of \d+ calls without a transfer",
        ),
        rules="KV-HOOK-004",
        variants="scheduler worker",
    ),
    mistake(
        "PollsWithATimeout",
        on(
            f"{DURATIONS}[worker]",
            r"get_transfer_results took (49|5\d) ms or more in each of \d+ calls without a transfer",
        ),
        rules="KV-HOOK-004",
        variants="scheduler worker",
    ),
    mistake(
        "AcceptsTails",
        on(
            "accepted_partial_tail_is_saved_and_freed",
            r"register_finished_partial_tail returned True for block \d+, and the metadata of the next 20 "
            "steps does not name",
        ),
        rules="KV-HOOK-005",
        variants="none",
        **STATES,
    ),
    mistake(
        "RepeatsEvents",
        on("events_are_taken_once", r"take_events gave 3 events again in each of 5 steps without a request"),
        rules="KV-HOOK-006",
        variants="none",
    ),
]


def steps(run_cases: Callable[..., CellRun], connector: str, **cell: str) -> CellRun:
    return run_cases(connector, **cell, only=lambda planned: planned.module in MODULES)


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_mistake_is_found_by_its_case_alone_and_named_in_one_sentence(
    run_cases: Callable[..., CellRun], wrong: Wrong
) -> None:
    run = steps(run_cases, wrong.connector, **wrong.cell)
    found = {name: finding.happened for name, finding in run.findings.items()}
    of = {name: name if name in wrong.fails else name.partition("[")[0] for name in found}
    assert set(of.values()) == wrong.fails.keys(), found
    assert {run.outcomes[name] for name in run.outcomes.keys() - found} <= {"PASS", "NOT-APPLICABLE"}
    for name, happened in found.items():
        assert run.findings[name].rule == wrong.rules
        assert re.search(wrong.fails[of[name]], happened), happened
        assert "\n" not in happened and len(happened) < 500


def test_every_rule_of_these_cases_has_a_mistake() -> None:
    rules = {case.rule for module in MODULES for case in load_module(module)[1]}
    assert rules == {wrong.rules for wrong in WRONG}


@pytest.mark.parametrize(
    ("connector", "cell"),
    [
        ("Right", {}),
        ("SureLater", {}),
        ("YieldsEvents", {}),
        ("ReferenceConnector", {}),
        ("ReferenceConnector", STATES),
        ("SavesTails", STATES),
        ("SureLater", {"family": "gemma3_1b"}),
    ],
)
def test_a_right_connector_passes(
    run_cases: Callable[..., CellRun], connector: str, cell: dict[str, str]
) -> None:
    run = steps(run_cases, connector, **({"family": "llama3_1_8b", "topology": "P1D1"} | cell))
    assert {name: said for name, said in run.outcomes.items() if said != "PASS"}.items() <= {
        ("saved_prompts_load_with_a_step_in_flight", "NOT-APPLICABLE")  # of stores
    }, run.findings
    assert len(run.outcomes) >= 3
