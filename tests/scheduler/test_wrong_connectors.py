"""Every planted mistake of a scheduler half is found by the cases of its rule, and called by no other rule; right connectors pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pytest_kvconform.plan import PlannedCase, load_module
from tests.helpers.case_runner import CellRun

MODULES = (
    "protocol/hooks",
    "protocol/matched_tokens",
    "protocol/connector_metadata",
    "protocol/request_finished",
    "protocol/loads",
)
SHORT = 0.1  # of deadlines, where one of them has to be waited for


@dataclass(frozen=True)
class Wrong:
    """One mistake: the rules that findings name, and cases that find it, as "case" or "case[variant]". What else is found, if anything,
    is found by other cases and named by the same rules.
    """

    connector: str
    rules: str
    by: str
    says: str  # pattern of what happened, somewhere in it
    geometry: str = "llama3_1_8b"
    topology: str = "P1D1"
    scale: float = 1.0  # of deadlines

    def __str__(self) -> str:
        return self.connector


ASKED, ENDED = "get_num_new_matched_tokens", "request_finished_all_groups"
WRONG = [
    # What it answers.
    Wrong(
        "AnswersFractions",
        "KV-MATCH-001",
        "returns_int_or_none_and_bool[handed_over]",
        r"returned \(53\.0, True\): the first",
    ),
    Wrong(
        "AnswersAlone",
        "KV-MATCH-001",
        "returns_int_or_none_and_bool[plain]",
        r"returned 0, and vLLM unpacks",
    ),
    Wrong(
        "FallsBelowZero",
        "KV-MATCH-001",
        "returns_int_or_none_and_bool[hit]",
        r"53 tokens, 48\) returned \(-11, True\)",
    ),
    Wrong(
        "AnnouncesMore",
        "KV-MATCH-002",
        "at_most_the_uncomputed_tokens[1] at_most_the_uncomputed_tokens[b]",
        r"returned \(\d+, True\): there are only \d+",
    ),
    Wrong(
        "ForgetsTheHit",
        "KV-MATCH-002",
        "at_most_the_tokens_after_a_local_hit[b]",
        r"49 tokens, 16\) returned \(49, True\): there are only 33",
    ),
    Wrong(
        "NothingComesLater",
        "KV-MATCH-003",
        "zero_tokens_is_never_async[2b+1]",
        r"returned \(0, True\)",
        "qwen3_5_35b_a3b",
        "P2D2",
    ),
    Wrong(
        "AnswersOnce",
        "KV-MATCH-004",
        "repeated_call_returns_the_same call_without_free_blocks_starts_no_load load_without_room_starts_later",
        r"0",
    ),
    Wrong(
        "AnswersLess",
        "KV-MATCH-004",
        "repeated_call_returns_the_same call_without_free_blocks_starts_no_load",
        r"\(52, True\)",
    ),
    Wrong(
        "AnswersAgain",
        "KV-MATCH-005",
        "returns_zero_after_the_load[preempted]",
        r"instead of \(0, False\)",
    ),
    Wrong(
        "NeverSure",
        "KV-MATCH-006",
        "none_is_followed_by_an_answer[handed_over]",
        r"\(None, False\) every time|knew no answer",
    ),
    # What it makes of blocks.
    Wrong(
        "LoadsByBlocks",
        "KV-MATCH-007",
        "update_state_after_alloc_with_zero_tokens_starts_no_load[discarded]",
        r"told of 0 tokens, and the metadata names blocks \[",
    ),
    Wrong(
        "LoadsTwice",
        "KV-MATCH-007 KV-META-003",
        "update_state_after_alloc_with_zero_tokens_starts_no_load[second_call]",
        r"told of 0 tokens|is ordered in steps",
    ),
    Wrong(
        "DropsTheLastBlock",
        "KV-MATCH-008",
        "load_fills_the_allocated_blocks[no_hit]",
        r"no load is ordered into blocks \[\d+\]",
    ),
    Wrong(
        "LoadsIntoNeighbours",
        "KV-MATCH-008",
        "load_fills_the_allocated_blocks[no_hit]",
        r"which are none of the request's",
    ),
    # What it does to requests.
    Wrong(
        "CutsPlainPrompts",
        "KV-MATCH-009",
        "on_new_request_leaves_request_unchanged[plain]",
        r"a request of 53 tokens and max_tokens 3 has 52 and 3",
    ),
    Wrong(
        "CutsAgain",
        "KV-MATCH-009",
        "on_new_request_leaves_request_unchanged[prefill_preempted]",
        r"53 tokens has 52 after a preemption",
    ),
    Wrong(
        "ComputesAhead",
        "KV-HOOK-003",
        "scheduler_assertions_hold[D]",
        r"vLLM's scheduler of D0 stopped with AssertionError",
    ),
    # What it tells its workers.
    Wrong(
        "TellsADict",
        "KV-META-001",
        "metadata_survives_pickle[empty]",
        r"returned a dict, which is no KVConnectorMetadata",
    ),
    Wrong(
        "TellsALock",
        "KV-META-001",
        "metadata_survives_pickle[empty]",
        r"does not survive pickle: TypeError: cannot pickle '_thread.lock'",
    ),
    Wrong(
        "TakesTheEnds",
        "KV-META-002",
        "build_connector_meta_leaves_scheduler_output_unchanged[D]",
        r"changed scheduler_output\.finished_req_ids",
    ),
    Wrong(
        "RepeatsLoads",
        "KV-META-003",
        "load_is_in_one_step_only[no_hit]",
        r"is ordered in steps \[|mentions it: the state of a step|still mentions",
    ),
    Wrong(
        "RepeatsSends",
        "KV-META-003",
        "finished_request_is_in_one_step_only[p-length]",
        r"mentions it: the state of a step is not reset|still mentions",
    ),
    Wrong(
        "ReusesTheList",
        "KV-META-004",
        "metadata_does_not_change_after_its_step[prefill]",
        r"named block \d.* and names cmpl-P0-0000 now",
    ),
    # How it ends requests.
    Wrong(
        "AnswersParamsAlone",
        "KV-FINISH-001",
        "returns_bool_and_params[plain-length]",
        rf"{ENDED}\(\w+\) returned",
    ),
    Wrong(
        "KeepsByNumber",
        "KV-FINISH-001",
        "returns_bool_and_params[p-length]",
        rf"{ENDED}\(\w+\) returned \([01], ",
    ),
    Wrong(
        "AddsASet",
        "KV-FINISH-002",
        "params_survive_json[p-length]",
        r"Object of type set is not JSON serializable",
    ),
    Wrong(
        "AddsNumberedKeys",
        "KV-FINISH-002",
        "params_survive_json[p-length]",
        r"do not come back from JSON as they went: 'ranks'",
    ),
    Wrong("AddsProtection", "KV-FINISH-002", "params_survive_json[p-stop]", r"params are a mappingproxy"),
    Wrong(
        "Remembers",
        "KV-FINISH-003",
        "every_block_is_freed[p-abort-new]",
        r"the connector still remembers cmpl-[PD]0-\d+: notes\.key",
    ),
    Wrong(
        "HoldsABlock",
        "KV-FINISH-003",
        "every_block_is_freed[p-length]",
        r"1 of 100 blocks did not come back",
    ),
    Wrong(
        "KeepsTheAborted",
        "KV-FINISH-004",
        "aborted_prefill_is_freed_at_once[p-abort-running]",
        r"returned True: P keeps blocks that nobody reads",
    ),
    Wrong(
        "HandsOverOldBlocks",
        "KV-FINISH-005",
        "params_name_the_final_blocks[preempted]",
        r"are none of \[|leave out blocks",
    ),
    Wrong(
        "GivesBlocksAway",
        "KV-FINISH-006",
        "handed_over_blocks_are_kept_until_sent[p-length]",
        r"P gave .* away before anybody has read them",
    ),
    # How it takes reports.
    Wrong(
        "ForgetsLateLoads",
        "KV-LOAD-001",
        "request_resumes_when_load_is_reported[late]",
        r"was reported, and it still waits",
    ),
    Wrong(
        "CountsOneRank",
        "KV-LOAD-002",
        "load_ends_with_the_last_rank[in_turn] send_ends_with_the_last_rank[in_turn]",
        r"although rank",
        "qwen3_5_35b_a3b",
        "P2D2",
    ),
    Wrong(
        "CountsAPeer",
        "KV-LOAD-002 KV-LOAD-001 KV-LOAD-004 KV-FINISH-003",  # nothing comes to an end
        "load_ends_with_the_last_rank[in_turn] send_ends_with_the_last_rank[in_turn]",
        r"still",
        "qwen3_5_35b_a3b",
        "P2D2",
    ),
    Wrong(
        "KnowsEveryLoad",
        "KV-LOAD-003",
        "update_connector_output_takes_any_report[unknown]",
        r"update_connector_output raised KeyError",
    ),
    Wrong(
        "WantsASet",
        "KV-LOAD-003",
        "update_connector_output_takes_any_report[nothing]",
        r"update_connector_output raised TypeError",
    ),
    Wrong(
        "HidesErrors",
        "KV-LOAD-004",
        "failed_load_ends_its_request[request]",
        r"failed, and its request ends with 'stop'",
    ),
    Wrong(
        "FreesTheCancelled",
        "KV-LOAD-005",
        "aborted_load_frees_blocks_after_its_report[begun]",
        r"blocks of cmpl-D0-\d+ are free, and its load may",
    ),
    Wrong(
        "CannotReset",
        "KV-LOAD-006",
        "reset_cache_works_at_any_time[loading]",
        r"reset_cache raised RuntimeError: a load is under way",
    ),
    # How it fails.
    Wrong(
        "RaisesAtTheEnd",
        "KV-HOOK-001",
        "no_hook_raises[p-abort-running]",
        rf"{ENDED} raised KeyError: 'cmpl-P0-0000' \(wrong_connectors\.py:\d+\)",
    ),
    Wrong(
        "Exits", "KV-HOOK-001", "no_hook_raises[d-length]", r"on_new_request raised SystemExit: no such peer"
    ),
    Wrong(
        "Crashes",
        "KV-HOOK-002",
        "every_hook_returns_soon[loading]",
        r"died of SIGSEGV, in update_state_after_alloc \(wrong_connectors_scheduler\.py:\d+\)",
    ),
    Wrong(
        "PrintsAndAborts",
        "KV-HOOK-002",
        "every_hook_returns_soon[loading]",
        r"died of SIGABRT, in update_state_after_alloc",
    ),
    Wrong(
        "LeavesAtOnce",
        "KV-HOOK-002",
        "every_hook_returns_soon[loading]",
        r"ended with exit code 0, in update_state_after_alloc",
    ),
    Wrong(
        "WaitsForWorkers",
        "KV-HOOK-002",
        "every_hook_returns_soon[loading]",
        r"^build_connector_meta took 1\.\d s and 1\.\d s in steps \d+ and \d+ of D0",
    ),
    Wrong(
        "OneAtATime",
        "KV-HOOK-002 KV-MATCH-004",
        "every_hook_returns_soon[loading]",
        r"nobody reports what is loading, .* another request is WAITING",
    ),
]


def names(words: str) -> set[str]:
    return set(words.split())


def chosen(wrong: Wrong) -> Callable[[PlannedCase], bool]:
    """Of every case the first variant, and those that are named."""
    first: dict[str, str] = {}

    def choose(planned: PlannedCase) -> bool:
        name, variant = planned.case.name, str(planned.variant)
        return planned.module in MODULES and (
            first.setdefault(name, variant) == variant or f"{name}[{variant}]" in names(wrong.by)
        )

    return choose


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_mistake_is_found_by_its_cases_and_named_by_its_rule(
    run_cases: Callable[..., CellRun], wrong: Wrong
) -> None:
    run = run_cases(wrong.connector, wrong.geometry, wrong.topology, scale=wrong.scale, only=chosen(wrong))
    assert "HARNESS" not in run.outcomes.values(), [
        result.reason for result in run.results if result.outcome == "HARNESS"
    ]
    assert names(wrong.by) <= run.failed, f"{names(wrong.by) - run.failed} did not find it"
    found = {(finding.rule, finding.happened) for finding in run.findings.values()}
    assert {rule for rule, _ in found} == names(wrong.rules), found
    for case in names(wrong.by):
        assert run.findings[case].rule == wrong.rules.split()[0]
        assert re.search(wrong.says, run.findings[case].happened), run.findings[case].happened
    assert all("\n" not in said and len(said) < 500 for _, said in found)
    assert (run.verdict.word, run.verdict.exit_code) == ("VIOLATES", 1)


def test_a_hook_that_stands_still_is_waited_for_three_times_and_no_more(
    run_cases: Callable[..., CellRun],
) -> None:
    wrong = Wrong("StandsStill", "KV-HOOK-002", "every_hook_returns_soon[loading]", "", scale=SHORT)
    run = run_cases(wrong.connector, wrong.geometry, wrong.topology, scale=SHORT, only=chosen(wrong))
    said = [finding.happened for finding in run.findings.values()]
    assert len(said) == 3 and "BLOCKED" in run.outcomes.values()
    for happened in said:
        assert re.search(
            r"did not come back within \S+ s, in update_state_after_alloc \(wrong_connectors\.py:\d+\)",
            happened,
        )


def test_every_rule_of_these_cases_has_a_mistake_that_only_it_names() -> None:
    rules = {case.rule for module in MODULES for case in load_module(module)[1]}
    assert rules - {wrong.rules for wrong in WRONG} == set()


@pytest.mark.parametrize(
    ("connector", "geometry", "topology"),
    [
        ("Right", "llama3_1_8b", "P1D1"),
        ("SureLater", "llama3_1_8b", "P1D1"),
        ("SureLater", "gemma3_1b", "P1D1"),
        ("Right", "qwen3_5_35b_a3b", "P1D2"),
        ("NixlConnector", "llama3_1_8b", "P2D1"),
    ],
)
def test_a_right_connector_passes_every_case(
    run_cases: Callable[..., CellRun], connector: str, geometry: str, topology: str
) -> None:
    run = run_cases(connector, geometry, topology, only=lambda planned: planned.module in MODULES)
    assert {name: outcome for name, outcome in run.outcomes.items() if outcome != "PASS"} == {}
    assert len(run.outcomes) > 100
    assert (run.verdict.word, run.verdict.exit_code) == ("CONFORMS", 0)
