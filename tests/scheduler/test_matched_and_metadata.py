"""Mistakes in get_num_new_matched_tokens, on_new_request and build_connector_meta are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers import rings
from tests.helpers.case_runner import CellRun
from tests.helpers.wrong import Wrong, on

from .checks import check_mistake

WRONG = [
    # Answers of get_num_new_matched_tokens.
    Wrong(
        "AnswersFractions",
        on("returns_int_or_none_and_bool[handed_over]", r"returned \(53\.0, True\): the first"),
        rules="KV-MATCH-001",
    ),
    Wrong(
        "AnswersAlone",
        on("returns_int_or_none_and_bool[plain]", r"returned 0, and vLLM unpacks"),
        rules="KV-MATCH-001",
    ),
    Wrong(
        "FallsBelowZero",
        on("returns_int_or_none_and_bool[hit]", r"53 tokens, 48\) returned \(-11, True\)"),
        rules="KV-MATCH-001",
    ),
    Wrong(
        "AnnouncesMore",
        on(
            "at_most_the_uncomputed_tokens[1] at_most_the_uncomputed_tokens[b]",
            r"returned \(\d+, True\): there are only \d+",
        ),
        rules="KV-MATCH-002",
    ),
    Wrong(
        "ForgetsTheHit",
        on(
            "at_most_the_tokens_after_a_local_hit[b]",
            r"49 tokens, 16\) returned \(49, True\): there are only 33",
        ),
        rules="KV-MATCH-002",
    ),
    Wrong(
        "RemembersTheAnswer",
        on(
            "at_most_the_tokens_after_a_local_hit[b]",
            r"49 tokens, 16\) returned \(49, True\): there are only 33",
        ),
        rules="KV-MATCH-002",
    ),
    Wrong(
        "NothingComesLater",
        on("zero_tokens_is_never_async[2b+1]", r"returned \(0, True\)"),
        rules="KV-MATCH-003",
        family="qwen3_5_35b_a3b",
        topology="P2D2",
    ),
    Wrong(
        "LoadsWhenAsked",
        on(
            "call_without_free_blocks_starts_no_load load_without_room_starts_later",
            r"step \d+ orders a load into blocks \[\d+.*, which has no block yet",
        ),
        rules="KV-MATCH-004",
    ),
    Wrong(
        "AnswersOnce",
        on(
            (
                "repeated_call_returns_the_same call_without_free_blocks_starts_no_load "
                "load_without_room_starts_later"
            ),
            r"0",
        ),
        rules="KV-MATCH-010",
    ),
    Wrong(
        "AnswersLess",
        on("repeated_call_returns_the_same call_without_free_blocks_starts_no_load", r"\(52, True\)"),
        rules="KV-MATCH-010",
    ),
    Wrong(
        "AnswersAgain",
        on(
            "announces_no_freed_blocks_after_the_load[preempted]",
            r"returned \(\d+, True\): it announced a second load in step \d+, and no load is ordered",
        ),
        rules="KV-MATCH-005",
    ),
    Wrong(
        "LoadsFreedBlocks",
        {
            "announces_no_freed_blocks_after_the_load[preempted]": r"step \d+, from blocks that P has freed",
            "failed_load_is_recomputed[request]": r"was loaded \d+ times: each get_num_new_matched_tokens",
        },
        rules="KV-MATCH-005",
    ),
    Wrong(
        "NeverSure",
        on("none_is_followed_by_an_answer[handed_over]", r"knew no answer for cmpl-D0-0000: it waits"),
        rules="KV-MATCH-006",
        night=True,
    ),
    # Loads after update_state_after_alloc.
    Wrong(
        "LoadsByBlocks",
        on(
            "update_state_after_alloc_with_zero_tokens_starts_no_load[discarded]",
            r"got 0 tokens, and the metadata names blocks \[",
        ),
        rules="KV-MATCH-007",
    ),
    Wrong(
        "LoadsTwice",
        on(
            "update_state_after_alloc_with_zero_tokens_starts_no_load[second_call]",
            r"got 0 tokens",
        ),
        rules="KV-MATCH-007",
    ),
    Wrong(
        "DropsTheLastBlock",
        on("load_fills_the_allocated_blocks[no_hit]", r"no load is ordered into blocks \[\d+\]"),
        rules="KV-MATCH-008",
    ),
    Wrong(
        "LoadsIntoNeighbours",
        on("load_fills_the_allocated_blocks[no_hit]", r"which are none of the request's"),
        rules="KV-MATCH-008",
    ),
    # Changes of requests.
    Wrong(
        "CutsPlainPrompts",
        on(
            "on_new_request_leaves_request_unchanged[plain]",
            r"a request of 53 tokens and max_tokens 3 has 52 and 3",
        ),
        rules="KV-MATCH-009",
    ),
    Wrong(
        "CutsAgain",
        on(
            "on_new_request_leaves_request_unchanged[prefill_preempted]",
            r"a prompt of 53 tokens was cut to 52, and D loads 53",
        ),
        rules="KV-MATCH-009",
    ),
    Wrong(
        "ComputesAhead",
        on("scheduler_assertions_hold[D]", r"vLLM's scheduler of D0 stopped with AssertionError"),
        rules="KV-HOOK-003",
    ),
    # The metadata of a step.
    Wrong(
        "TellsNothing",
        on(
            "metadata_survives_pickle[empty]", r"returned None, and the worker asserts that there is metadata"
        ),
        rules="KV-META-001",
    ),
    Wrong(
        "TellsALock",
        on(
            "metadata_survives_pickle[empty]",
            r"does not survive pickle: TypeError: cannot pickle '_thread.lock'",
        ),
        rules="KV-META-001",
    ),
    Wrong(
        "TakesTheEnds",
        on(
            "build_connector_meta_leaves_scheduler_output_unchanged[D]",
            r"changed scheduler_output\.finished_req_ids",
        ),
        rules="KV-META-002",
    ),
    Wrong(
        "RepeatsLoads",
        on(
            "load_is_not_ordered_into_freed_blocks[no_hit]",
            r"cmpl-D\d-\d+ has ended and its blocks are free, and the metadata of step \d+ names it with its "
            r"blocks \[\d+, ",
        ),
        rules="KV-META-003",
    ),
    Wrong(
        "SendsAgain",
        on(
            "freed_blocks_are_in_no_order[p-length]",
            r"cmpl-P0-\d+ has ended and its blocks are free, and the metadata of step \d+ names it with its "
            r"blocks \[\d+, ",
        ),
        rules="KV-META-003",
    ),
    Wrong(
        "ReusesTheList",
        on(
            "metadata_does_not_change_after_its_step[prefill]", r"named block \d.* and names cmpl-P0-0000 now"
        ),
        rules="KV-META-004",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_mistake_is_found_by_its_cases_and_named_by_its_rule(
    run_cases: Callable[..., CellRun], wrong: Wrong, pytestconfig: pytest.Config
) -> None:
    check_mistake(run_cases, wrong, everywhere=rings.is_night(pytestconfig))
