"""Every check catches the connector that makes its mistake, says which mistake it is, and lets the right ones pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pytest_kvconform.plan import load_module, module_names
from tests.helpers.case_runner import CellRun

from .command import Command

STOPPED = {
    "all_blocks_are_freed",
    "attention_kv_arrives",
    "unowned_blocks_are_unchanged",
    "d_computes_only_missing_tokens",
    "outputs_match_the_oracle",
}  # cases that need a hand-over that ended
DUMB = {"attention_kv_arrives", "unowned_blocks_are_unchanged"}  # cases that need KV that was given
WRONG_KV = {
    "attention_kv_arrives",
    "outputs_match_the_oracle",
}  # bytes and, so large are the mistakes here, what D says


@dataclass(frozen=True)
class Wrong:
    """One mistake, and all that the suite says about it: which cases fail, which are blocked; every other one passes."""

    connector: str
    fails: set[str]  # names of cases, in every one of the variants
    says: str  # pattern: a phrase of the sentence or the diagnosis of the first of them, by name
    family: str = "llama"
    topology: str = "P1D1"
    variants: str = "n200"
    blocked: set[str] = field(default_factory=set)
    scale: float = 1.0  # of deadlines, small where one of them has to be waited for
    unsure: set[str] = field(default_factory=set)  # cases about which nothing is said here

    def __str__(self) -> str:
        return f"{self.connector}-{self.family}-{self.topology}"


SHORT = 0.2
# A D that never reads has P's address only after its last step, and tells P that it is done in the next one, which may not come.
FIRST_WORD = {"all_blocks_are_freed"}
MOVED = r"token is (off by|mixed up)"  # rows of equal words make the distance ambiguous

WRONG = [
    # What is in D's cache.
    Wrong(
        "MovesNothing",
        WRONG_KV,
        "tokens 0-198 of all 4 layers was never written",
        variants="n33 n200",
        scale=SHORT,
        unsure=FIRST_WORD,
    ),
    Wrong("MovesNothing", WRONG_KV, "never written", topology="P2D1", scale=SHORT, unsure=FIRST_WORD),
    Wrong("LateByOne", WRONG_KV, rf"{MOVED}.*\+32", variants="n64 n200"),
    Wrong("DropsTail", WRONG_KV, r"tokens 192-198 of all 4 layers was never written"),
    Wrong("SwapsBlocks", {"attention_kv_arrives"}, rf"in all 1024 rows: {MOVED}.*\+32, 512 times"),
    Wrong("SwapsHeads", WRONG_KV, "head 0 and head 1 are exchanged"),
    Wrong(
        "SwapsLayers",
        WRONG_KV,
        r"model\.layers\.0\.self_attn\.attn holds rows of model\.layers\.1\.self_attn\.attn",
    ),
    Wrong("ForgetsLayer", WRONG_KV, r"tokens 0-198 of model\.layers\.3\.self_attn\.attn holds zeros"),
    Wrong(
        "OneBit",
        {"attention_kv_arrives"},
        r"token 5 of model\.layers\.3\.self_attn\.attn, K only, head 1 only holds bytes that are nowhere",
    ),
    Wrong(
        "OneBit",
        {"attention_kv_arrives"},
        r"token 5 of model\.layers\.5\.self_attn\.attn, K only",
        family="gemma3",
    ),
    Wrong(
        "HalfAWindow",
        WRONG_KV,
        r"tokens 168-191 of model\.layers\.0\.self_attn\.attn.* was never written",
        family="gemma3",
    ),
    Wrong("WritesNull", {"unowned_blocks_are_unchanged"}, "blocks 0 of D changed.*block 0 is the null block"),
    Wrong(
        "WritesOutside",
        {"unowned_blocks_are_unchanged"},
        r"blocks \d+ of D changed, which belong to no request",
    ),
    # The recurrent state.
    Wrong(
        "RollsConvolution",
        {"recurrent_state_arrives", "outputs_match_the_oracle"},
        "convolution K garbled, convolution Q garbled, convolution V garbled$",
        family="qwen3_5",
        variants="two_at_once",
    ),
    Wrong(
        "ZeroesState",
        {"recurrent_state_arrives", "outputs_match_the_oracle"},
        "recurrent state zero$",
        family="qwen3_5",
        variants="two_at_once",
    ),
    Wrong(
        "NoTruncation",
        {"recurrent_state_arrives", "outputs_match_the_oracle"},
        r"D runs \+1 tokens through a state that has seen them already",
        family="qwen3_5",
        variants="n63",
    ),
    # When and what it reports.
    Wrong("ReportsEarly", {*WRONG_KV, "all_blocks_are_freed"}, "never written", scale=SHORT),
    Wrong(
        "NeverFinishes",
        {"completes"},
        "the connector never reported the load as finished",
        blocked=STOPPED,
        scale=SHORT,
    ),
    Wrong(
        "ReportsTwice",
        {"completes"},
        r"D raised AssertionError in _update_from_kv_xfer_finished \(scheduler.py:\d+\)",
        blocked=STOPPED,
    ),
    Wrong(
        "KeepsBlocks", {"all_blocks_are_freed"}, r"P still holds 7 of \d+ blocks and 1 requests", scale=SHORT
    ),
    Wrong(
        "RecomputesQuietly",
        {"d_computes_only_missing_tokens"},
        "D recomputed the prompt: get_num_new_matched_tokens announced nothing",
        blocked=DUMB,
        variants="n63 n200",
        scale=SHORT,
        unsure=FIRST_WORD,
    ),
    Wrong(
        "AnnouncesLess",
        {"d_computes_only_missing_tokens"},
        "get_num_new_matched_tokens announced less than P had",
    ),
    Wrong(
        "AnnouncesMore",
        {"completes"},
        r"D raised AssertionError in schedule \(scheduler.py:\d+\)",
        blocked=STOPPED,
    ),
    Wrong(
        "NoHandover",
        {"d_computes_only_missing_tokens"},
        "request_finished returned None for its params",
        blocked=DUMB,
    ),
    # How it fails.
    Wrong(
        "CrashesInLoad",
        {"completes"},
        r"D was killed by SIGSEGV in start_load_kv \(wrong_connectors.py:\d+\)",
        blocked=STOPPED,
    ),
    Wrong(
        "CrashesInLoad", {"completes"}, r"worker 0 .*died|in start_load_kv", topology="P1D2", blocked=STOPPED
    ),
    Wrong(
        "HangsInLoad",
        {"completes"},
        r"D did not answer within \d s in start_load_kv \(wrong_connectors.py:\d+\)",
        blocked=STOPPED,
        scale=SHORT,
    ),
    Wrong(
        "HangsInLoad",
        {"completes"},
        r"D did not answer within \d s in start_load_kv \(wrong_connectors.py:\d+\)",
        topology="P1D2",
        blocked=STOPPED,
        scale=SHORT,
    ),
    Wrong(
        "RaisesInLoad",
        {"completes"},
        r"D raised RuntimeError in start_load_kv \(wrong_connectors.py:\d+\): the wire is cut",
        blocked=STOPPED,
    ),
    Wrong(
        "LeavesInLoad",
        {"completes"},
        r"D left with exit code 1 in start_load_kv \(wrong_connectors.py:\d+\)",
        blocked=STOPPED,
    ),
    Wrong(
        "RaisesAtStart",
        {"engines_start"},
        "P did not start: ValueError: no such fabric",
        blocked=STOPPED | {"completes"},
    ),
    Wrong(
        "CrashesAtStart",
        {"engines_start"},
        r"P was killed by SIGSEGV in register_kv_caches \(wrong_connectors.py:\d+\)",
        blocked=STOPPED | {"completes"},
    ),
    # How it ends.
    Wrong(
        "LeavesThread",
        {"no_threads_ports_or_processes_left"},
        r"after shutdown P still has 1 threads \(kv-forgotten\)",
        variants="two_at_once",
    ),
    Wrong(
        "LeavesPort",
        {"no_threads_ports_or_processes_left"},
        r"after shutdown P still has 1 listening ports \(127\.0\.0\.1:\d+\)",
        variants="two_at_once",
    ),
    Wrong(
        "LeavesProcess",
        {"no_threads_ports_or_processes_left"},
        r"after shutdown P still has 1 processes \(\d+\)",
        variants="two_at_once",
    ),
    Wrong(
        "RaisesInShutdown",
        {"no_threads_ports_or_processes_left"},
        "shutdown of P raised OSError: the fabric was gone",
        variants="two_at_once",
    ),
    Wrong(
        "RankRaisesInShutdown",
        {"no_threads_ports_or_processes_left"},
        "shutdown of D raised OSError: the fabric of rank 1 was gone",
        variants="two_at_once",
        topology="P1D2",
    ),
    Wrong(
        "DiesInShutdown",
        {"no_threads_ports_or_processes_left"},
        "P left with exit code 3 in shutdown",
        variants="two_at_once",
    ),
    Wrong(
        "HangsInShutdown",
        {"no_threads_ports_or_processes_left"},
        r"P did not answer within \d s in shutdown \(wrong_connectors.py:\d+\)",
        variants="two_at_once",
        scale=SHORT,
    ),
    # What it is.
    Wrong(
        "NoHMA",
        {"hybrid_allocator_stays_on"},
        "NoHMA does not inherit SupportsHMA",
        family="gemma3",
        variants="n64",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_mistake_is_caught_and_named_and_nothing_else_is(
    run_cases: Callable[..., CellRun], wrong: Wrong
) -> None:
    run = run_cases(wrong.connector, wrong.family, wrong.topology, wrong.variants, wrong.scale)
    by_case: dict[str, set[str]] = {}
    for name, outcome in run.outcomes.items():
        if (case := name.partition("[")[0]) not in wrong.unsure:
            by_case.setdefault(case, set()).add(outcome)
    assert by_case == {
        case: {"FAIL" if case in wrong.fails else "BLOCKED" if case in wrong.blocked else "PASS"}
        for case in by_case
    }
    assert wrong.fails <= by_case.keys()
    assert (run.verdict.word, run.verdict.exit_code) == ("VIOLATES", 1)
    finding = run.findings[min(name for name in run.failed if name.partition("[")[0] == _main(wrong))]
    assert re.search(wrong.says, f"{finding.happened}\n{finding.diagnosis}", re.MULTILINE)


def _main(wrong: Wrong) -> str:
    """The case that says most: the one about bytes, state or the end, before the one about what D says in the end."""
    return min(wrong.fails - {"outputs_match_the_oracle", "all_blocks_are_freed"} or wrong.fails)


def test_every_case_of_the_engine_tier_has_a_mistake_that_only_it_catches() -> None:
    cases = {
        case.name
        for module in module_names()
        if module.startswith("engine/")
        for case in load_module(module)[1]
    }
    alone = {
        min(wrong.fails - {"outputs_match_the_oracle"})
        for wrong in WRONG
        if len(wrong.fails - {"outputs_match_the_oracle"}) == 1
    }
    assert cases - alone == {
        "outputs_match_the_oracle",
        "sliding_window_is_complete",
    }  # the outputs judge what all others do; upstream itself breaks the window


FEW = "n1 n63 n64 n65 two_at_once partial_hit abort_loading"
RIGHT = [
    ("PrintsBinary", "llama", "n1 n64 n200 two_at_once full_hit abort_waiting"),
    ("BacksOff", "gemma3", ""),
    ("Right", "qwen3_5", FEW),
]


@pytest.mark.parametrize(
    ("connector", "family", "variants"), RIGHT, ids=[f"{row[0]}-{row[1]}" for row in RIGHT]
)
def test_a_right_connector_passes_every_case(
    run_cases: Callable[..., CellRun], connector: str, family: str, variants: str
) -> None:
    run = run_cases(connector, family, variants=variants)
    assert set(run.outcomes.values()) == {"PASS"}
    assert (run.verdict.word, run.verdict.exit_code) == ("CONFORMS", 0)


def test_the_positive_control_gets_the_verdict_of_nixl_connector(
    run_cases: Callable[..., CellRun], nixl_on_llama: Command
) -> None:
    run = run_cases("Right", "llama")
    assert {result.id: result.outcome.value for result in run.results} == nixl_on_llama.outcomes
    assert run.verdict.word == nixl_on_llama.word == "CONFORMS"
    assert run.verdict.exit_code == nixl_on_llama.code == 0
    assert run.verdict.sentence == nixl_on_llama.report["verdict"]["sentence"]
