"""Mistakes in request_finished and in uses of reports are found, and hooks that raise, hang or exit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from tests.helpers import rings
from tests.helpers.case_runner import CellRun
from tests.helpers.wrong import Wrong, on

from .checks import check_mistake, chosen

SHORT = 0.1  # of deadlines: the test waits for one of them
ENDED = "request_finished_all_groups"
WRONG = [
    # How it ends requests.
    Wrong(
        "AnswersParamsAlone",
        on("returns_bool_and_params[plain-length]", rf"{ENDED}\(\w+\) returned"),
        rules="KV-FINISH-001",
    ),
    Wrong(
        "KeepsInWords",
        on("returns_bool_and_params[p-length]", rf"{ENDED}\(\w+\) returned \('yes', .*combines the first"),
        rules="KV-FINISH-001",
    ),
    Wrong(
        "AddsANumber",
        on(
            "params_survive_json[p-length]",
            r"through msgpack and JSON, which refuse them: Encoding objects of type numpy.int64",
        ),
        rules="KV-FINISH-002",
    ),
    Wrong(
        "AddsNumberedKeys",
        on(
            "params_survive_json[p-length]",
            r"through msgpack and JSON, which refuse them: Expected `str`, got `int` - at `key`",
        ),
        rules="KV-FINISH-002",
    ),
    Wrong(
        "AddsProtection",
        on("params_survive_json[p-stop]", r"params are a mappingproxy"),
        rules="KV-FINISH-002",
    ),
    Wrong(
        "Remembers",
        on(
            "memory_of_ended_requests_is_bounded[p-abort-new]",
            r"connector of P0 remembers ever more requests that have ended, 165 of 165 by now: notes\.key",
        ),
        rules="KV-FINISH-003",
    ),
    Wrong(
        "HoldsABlock",
        on("every_block_is_freed[p-length]", r"1 of 100 blocks were not freed"),
        rules="KV-FINISH-003",
    ),
    Wrong(
        "TellsNobodyOfWhatItKeeps",
        on("request_resumes_when_load_is_reported[late]", r"on D0 the scheduler still knows"),
        rules="KV-FINISH-003 KV-LOAD-001",
    ),
    Wrong(
        "KeepsTheAborted",
        on(
            "aborted_prefill_is_freed_at_once[p-abort-running]",
            r"returned True: P keeps blocks that no peer reads, and in 4 s the worker half has not reported",
        ),
        rules="KV-FINISH-004",
    ),
    Wrong(
        "HandsOverOldBlocks",
        on("params_name_the_final_blocks[preempted]", r"are none of \[|leave out blocks"),
        rules="KV-FINISH-005",
    ),
    Wrong(
        "GivesBlocksAway",
        on("handed_over_blocks_are_kept_until_sent[p-length]", r"P freed .* before any peer has read them"),
        rules="KV-FINISH-006",
    ),
    # How it takes reports.
    Wrong(
        "ForgetsLateLoads",
        on("request_resumes_when_load_is_reported[late]", r"was reported, and 20 steps later it still waits"),
        rules="KV-LOAD-001",
    ),
    Wrong(
        "CountsAPeer",
        on("load_ends_with_the_last_rank[in_turn] send_ends_with_the_last_rank[in_turn]", r"still"),
        rules="KV-LOAD-002 KV-LOAD-001 KV-LOAD-004 KV-FINISH-003",
        family="qwen3_5_35b_a3b",
        topology="P2D2",
    ),
    Wrong(
        "KnowsEveryLoad",
        on("update_connector_output_takes_any_report[unknown]", r"update_connector_output raised KeyError"),
        rules="KV-LOAD-003",
    ),
    Wrong(
        "WantsASet",
        on("update_connector_output_takes_any_report[nothing]", r"update_connector_output raised TypeError"),
        rules="KV-LOAD-003",
    ),
    Wrong(
        "HidesErrors",
        on("failed_load_ends_its_request[request]", r"failed, and its request ends with 'stop'"),
        rules="KV-LOAD-004",
    ),
    Wrong(
        "FreesTheCancelled",
        on(
            "aborted_load_frees_blocks_after_its_report[begun]",
            r"blocks of cmpl-D0-\d+ are free, and its load may",
        ),
        rules="KV-LOAD-005",
    ),
    Wrong(
        "ForgetsAtReset",
        on(
            "reset_cache_works_at_any_time[loading]",
            r"after reset_cache while loading: update_connector_output raised KeyError: 'cmpl-D\d-0000'",
        ),
        rules="KV-LOAD-006",
    ),
    Wrong(
        "CannotReset",
        on("reset_cache_raises_no_error[loading]", r"reset_cache raised RuntimeError: a load is under way"),
        rules="KV-LOAD-007",
    ),
    # How it fails.
    Wrong(
        "RaisesAtTheEnd",
        on(
            "no_hook_raises[p-abort-running]",
            rf"{ENDED} raised KeyError: 'cmpl-P0-0000' \(failures\.py:\d+\)",
        ),
        rules="KV-HOOK-001",
    ),
    Wrong(
        "Exits",
        on("no_hook_raises[d-length]", r"on_new_request raised SystemExit: no such peer"),
        rules="KV-HOOK-001",
    ),
    Wrong(
        "Crashes",
        on(
            "every_hook_returns_soon[loading]",
            r"died of SIGSEGV, in update_state_after_alloc \(failures\.py:\d+\)",
        ),
        rules="KV-HOOK-002",
    ),
    Wrong(
        "PrintsAndAborts",
        on("every_hook_returns_soon[loading]", r"died of SIGABRT, in update_state_after_alloc"),
        rules="KV-HOOK-002",
    ),
    Wrong(
        "LeavesAtOnce",
        on("every_hook_returns_soon[loading]", r"ended with exit code 0, in update_state_after_alloc"),
        rules="KV-HOOK-002",
    ),
    Wrong(
        "WaitsForWorkers",
        on(
            "every_hook_returns_soon[loading]",
            r"^build_connector_meta took 1\.\d s and 1\.\d s in steps \d+ and \d+ of D0",
        ),
        rules="KV-HOOK-002",
    ),
    Wrong(
        "OneAtATime",
        on(
            "every_hook_returns_soon[loading]",
            r"no worker reports what is loading, .* another request is WAITING",
        ),
        rules="KV-HOOK-002",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_mistake_is_found_by_its_cases_and_named_by_its_rule(
    run_cases: Callable[..., CellRun], wrong: Wrong, pytestconfig: pytest.Config
) -> None:
    check_mistake(run_cases, wrong, everywhere=rings.is_night(pytestconfig))


def test_a_hook_that_stands_still_is_waited_for_twice_in_a_module_and_no_more(
    run_cases: Callable[..., CellRun],
) -> None:
    wrong = Wrong("StandsStill", on("every_hook_returns_soon[loading]", ""), rules="KV-HOOK-002", scale=SHORT)
    run = run_cases(wrong.connector, **wrong.cell, only=chosen(wrong))
    said = [finding.happened for finding in run.findings.values()]
    hung = Counter(result.id.split("::")[1] for result in run.results if result.finding)
    assert len(hung) <= 3 and max(hung.values()) == 2 and "BLOCKED" in run.outcomes.values()
    for happened in said:
        assert re.search(
            r"did not end within \S+ s, in update_state_after_alloc \(failures\.py:\d+\)",
            happened,
        )
