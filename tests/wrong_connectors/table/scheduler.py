"""Mistakes of the scheduler half alone."""

from __future__ import annotations

from tests.helpers.wrong import ANY, Right, Theme, Wrong, cases_of, on

MODULE = "tests.wrong_connectors.scheduler"
GEOMETRIES = ("llama3_1_8b", "gemma3_1b", "qwen3_5_35b_a3b")
MODULES = (
    "protocol/hooks",
    "protocol/matched_tokens",
    "protocol/connector_metadata",
    "protocol/request_finished",
    "protocol/loads",
)
ENDED = "request_finished_all_groups"
FINISHED = [
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
        night=True,
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
    # Cases of a rule that others find as well. This one says of P what its own rule says of D.
    Wrong(
        "CountsAPeer",
        on("load_fails_if_one_rank_fails[last]", "the scheduler still knows"),
        family="qwen3_5_35b_a3b",
        topology="P2D2",
    ),
    Wrong(
        "HoldsABlock",
        on("requests_that_end_together_are_all_freed[length+abort]", "2 of 100 blocks were not freed"),
        rules="KV-FINISH-003",
    ),
    Wrong(
        "HidesErrors",
        on("failed_block_follows_the_policy[fail]", "D computed 0 tokens and ended with 'stop', due 0 and"),
        rules="KV-LOAD-004",
    ),
]

MATCHED = [
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

STATES = {"family": "qwen3_5_35b_a3b", "topology": "P2D2"}
LOADS = cases_of(MODULES, "KV-LOAD-")
IN_TURN = {"load_ends_with_the_last_rank", "send_ends_with_the_last_rank", "load_fails_if_one_rank_fails"}
RIGHT = [
    Right("Right"),
    Right("SureLater", night=True),
    Right("SureLater", family="gemma3_1b"),
    Right("Right", family="qwen3_5_35b_a3b", topology="P1D2"),
    Right("NixlConnector", topology="P2D1"),
    # One rank may report for all: cases in which one after the other reports do not apply.
    Right(
        "OneRankReports",
        **STATES,
        # without the one that needs a model of one KV cache group
        cases=LOADS.replace("failed_block_follows_the_policy", ""),
        not_applicable=IN_TURN | {f"{case}[one_rank]" for case in LOADS.split()},
    ),
]

cell = {"setup": "b16", "matrix": "full"}
THEMES = (
    Theme(
        "finished",
        MODULE,
        "protocol",
        FINISHED,
        GEOMETRIES,
        cell,
        MODULES,
        runs="first variants",
        others=ANY,
        longest=500,
    ),
    Theme(
        "matched",
        MODULE,
        "protocol",
        MATCHED,
        GEOMETRIES,
        cell,
        MODULES,
        runs="first variants",
        others=ANY,
        longest=500,
    ),
    Theme("right_halves", MODULE, "protocol", RIGHT, GEOMETRIES, cell, MODULES, others="PASS"),
)
