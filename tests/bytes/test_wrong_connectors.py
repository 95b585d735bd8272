"""Each mistake in whole transfers is found by the case about it, by no other case of the tier, and named in
one sentence.

Right connectors pass.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest

from pytest_kvconform.plan import load_module, module_names
from tests.helpers.case_runner import CellRun
from tests.helpers.fixtures import ROOT
from tests.helpers.wrong import Wrong

# modules of cases about whole transfers
WHOLE = ("bytes/blocks", "bytes/handover", "bytes/pool", "bytes/start")
# Other modules of the tier, and the tests that plant their mistakes. Here their cases may be blocked or not
# apply.
ELSEWHERE = {
    "bytes/each_transfer": "tests/faults/test_wrong_connectors.py",
    "bytes/layers": "tests/store/test_layers.py",
    "bytes/multi_connector": "tests/multi/test_inside.py",
    "bytes/statistics": "tests/bytes/test_hooks_and_statistics.py",
    "bytes/transport_faults": "tests/faults/test_wrong_connectors.py",
    "bytes/turns/next_turn": "tests/turns/test_turns.py",
}
# cases that need a load that ended
STOPPED = {
    "all_blocks_are_freed",
    "d_computes_only_missing_tokens",
    "d_loads_all_whole_blocks",
    "attention_kv_arrives",
    "rest_of_d_pool_is_unchanged",
    "p_pool_is_unchanged",
}
SHORT = 0.1  # of deadlines, where one of them has to be waited for


# three blocks and a half; D computes the last token itself
mistake = functools.partial(Wrong, variants="n55")


def rows(says: str) -> dict[str, str]:
    return {"attention_kv_arrives": says}


LAYERS = r"model\.layers\.0\.self_attn\.attn and 31 more layers"
WRITTEN_TO = "P's pool was written to, but loads only read it"

WRONG = [
    # Which blocks.
    mistake(
        "LateByOne",
        rows(r"block is off by \+1 in 638976 of 786432 wrong words; besides, 147456 words never written$"),
    ),
    mistake(
        "DropsTail", rows(rf"the last \(partial\) block was never written \(all 98304 words in {LAYERS}\)$")
    ),
    mistake(
        "WritesNull",
        {
            "rest_of_d_pool_is_unchanged": (
                "a load wrote outside its own blocks: block 0 holds tokens 0-15 of owner 0 of "
                r"model\.layers\.0"
            )
        },
    ),
    mistake(
        "WritesOutside",
        {
            "rest_of_d_pool_is_unchanged": (
                r"a load wrote outside its own blocks: block [1-9]\d* holds tokens 0-15 of owner 0 of "
                "model"
            )
        },
    ),
    mistake(
        "FirstGroupForAll",
        rows(
            "the block ids of one group were used for the layers of another: this explains all "
            "152064 words in .* and 21 more layers$"
        ),
        family="gemma3_1b",
    ),
    mistake(
        "FollowsTheFirst",  # its table of the second prompt lacks a block, which vLLM notices
        {"completes": r"D raised AssertionError in start_load_kv \(pull_worker.py:\d+\)$"},
        variants="chunked",
        blocked=STOPPED,
    ),
    mistake(
        "ShortWindow",
        rows(
            r"the first block of the window was never written \(all 45056 words in "
            r"model\.layers\.0\.self_attn\.attn and 21 more layers\)$"
        ),
        family="gemma3_1b",
        variants="n542",
        matrix="full",
    ),
    mistake(
        "ReadsFromTheWindow",
        rows(
            r"tokens 16-29 were never written \(all \d+ words in model\.layers\.0\.self_attn\.attn "
            r"and 21 more layers\)$"
        ),
        family="gemma3_1b",
        variants="n542",
        matrix="full",
    ),
    # Which bytes of a block.
    mistake("SwapsHeads", rows(r"head 2 and head 5 are exchanged in all 221184 words$")),
    mistake("ReversesHeads", rows(r"the heads are in reverse order: this explains all 884736 words")),
    mistake("HeadsOfTheOtherRank", rows(r"head is off by \+4 in all 442368 words$"), topology="P1D2"),
    mistake("SwapsPlanes", rows(r"K and V are exchanged: this explains all 884736 words")),
    mistake(
        "PackedAsSplit",
        rows(r"a packed K\|V per token was read as split \(.*\): this explains all 827392 words"),
    ),
    mistake("NhdInHnd", rows(r"NHD bytes were put into an HND cache: this explains all 870400 words")),
    mistake(
        "LocalStride",
        rows(r"the local block stride was used to find the remote blocks: this explains all \d+ words"),
        topology="P1D2",
    ),
    mistake(
        "ForgetsDraft",
        rows(r"no byte of model\.layers\.61\.self_attn\.attn \(draft\) was written"),
        "kimi_k2_5_eagle3",
        "P2D2",
    ),
    mistake(
        "CutsAcrossSegments",
        {
            "recurrent_state_arrives": (
                "the convolution state was cut in one piece across its segments: this explains all "
                "92160 words in .* and 29 more"
            )
        },
        family="qwen3_5_35b_a3b",
        topology="P1D2",
        variants="n2",
        matrix="full",
    ),
    # Which bytes around them.
    mistake(
        "LeavesStaleRows",
        {
            "rest_of_new_blocks_is_not_stale": (
                "the last block of a load is new, and the load does not reach its end; vLLM did not zero it, "
                "since get_loaded_kv_cache_group_ids names its group$"
            )
        },
        family="qwen3_5_35b_a3b",
        topology="P1D2",
        variants="n2",
        matrix="full",
    ),
    # When, and on which side.
    mistake(
        "ReportsEarly",
        {
            "attention_kv_arrives": (
                "884736 words were still unwritten when the load was reported complete; a later look "
                "found them correct$"
            ),
            # What came late came over what D had computed by then: its last
            # token, and the rest of that block.
            "rest_of_d_pool_is_unchanged": r"rows that the prefiller computed instead of the decoder",
        },
    ),
    mistake(
        "ReportsEarly",
        {
            "attention_kv_arrives": (
                "884736 words were still unwritten when the load was reported complete; a later look "
                "found them correct$"
            ),
            "rest_of_d_pool_is_unchanged": r"rows that the prefiller computed instead of the decoder",
        },
        topology="P2D1",
    ),
    mistake(
        "FreesAtOnce",
        rows(
            "the right remote blocks were read, but after they had been freed and overwritten: "
            "this explains all 884736 words"
        ),
        variants="reused",
    ),
    mistake(
        "WritesToP",
        {
            "p_pool_is_unchanged": (
                rf"{WRITTEN_TO}: \d+ words of {LAYERS} "
                "hold memory that the decoder had not written$"
            ),
            "attention_kv_arrives": rf"no byte of {LAYERS} was written \(all 884736 words\)$",
        },
    ),
    mistake(
        "ClearsWhatWasRead", {"p_pool_is_unchanged": rf"{WRITTEN_TO}: \d+ words of {LAYERS} hold zeros$"}
    ),
    mistake(
        "LoadsPartsOfBlocks",
        rows(
            "of layers with a window of 512 P has the tokens from 16 on, but D's block in which "
            "the window begins, .* those from 0 on$"
        ),
        family="gemma3_1b",
        setup="b16x64",
        variants="n528",
        matrix="full",
    ),
    # What is no matter of bytes.
    mistake(
        "NeverFinishes",
        {"completes": r"the connector never reported the load as finished"},
        blocked=STOPPED,
        scale=SHORT,
    ),
    mistake("KeepsBlocks", {"all_blocks_are_freed": r""}, scale=SHORT),
    mistake(
        "AnnouncesLess",
        {"d_loads_all_whole_blocks": r"get_num_new_matched_tokens announced less than P had"},
    ),
    mistake(
        "MovesNothing",
        {"d_computes_only_missing_tokens": r".*get_num_new_matched_tokens announced nothing$"},
        blocked={"d_loads_all_whole_blocks", "attention_kv_arrives"},
    ),
    mistake(
        "RaisesAtStart",
        {"engines_start": r"P did not start: ValueError in __init__ \(failures.py:\d+\): no such fabric"},
        blocked=STOPPED | {"completes"},
    ),
    # Upstream itself: see docs.
    mistake(
        "Right",
        {"sliding_window_is_complete": r"the block table is laid out for the token after the last one"},
        family="gemma3_1b",
        variants="n527",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_mistake_is_found_by_its_case_alone_and_named_in_one_sentence(
    run_cases: Callable[..., CellRun], wrong: Wrong
) -> None:
    run = run_cases(wrong.connector, **wrong.cell)
    outcomes = {name.partition("[")[0]: outcome for name, outcome in run.outcomes.items()}
    assert len(outcomes) == len(run.outcomes), "one variant"
    assert {case for case, outcome in outcomes.items() if outcome == "FAIL"} == wrong.fails.keys()
    whole = {name.partition("[")[0]: outcome for name, outcome in of_whole_transfers(run).outcomes.items()}
    assert whole == {
        case: "FAIL" if case in wrong.fails else "BLOCKED" if case in wrong.blocked else "PASS"
        for case in whole
    }
    assert (run.verdict.word, run.verdict.exit_code) == ("VIOLATES", 1)
    said = {name.partition("[")[0]: finding.diagnosis for name, finding in run.findings.items()}
    assert said.keys() == wrong.fails.keys()
    for case, pattern in wrong.fails.items():
        assert re.match(pattern, said[case]) and "\n" not in said[case] and len(said[case]) < 300


def test_a_hit_longer_than_the_window_is_not_taken_for_the_window(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("TakesTheHitForTheWindow", "gpt_oss_20b", matrix="quick")
    assert run.failed == {"attention_kv_arrives[hit9]"}
    assert "BLOCKED" not in run.outcomes.values() and run.verdict.word == "VIOLATES"
    assert re.match(
        r"no byte of model\.layers\.0\.attn\.attn and 11 more layers was written \(all 116736 words\)$",
        run.findings["attention_kv_arrives[hit9]"].diagnosis,
    )


def of_whole_transfers(run: CellRun) -> CellRun:
    """What cases about whole transfers reported."""
    return CellRun([result for result in run.results if result.id.split("::")[1] in WHOLE])


def test_every_case_of_whole_transfers_has_a_mistake_that_only_it_finds() -> None:
    cases = {case.name for module in WHOLE for case in load_module(module)[1]}
    assert cases == {min(wrong.fails) for wrong in WRONG if len(wrong.fails) == 1}


def test_every_other_module_of_the_tier_has_tests_of_its_own() -> None:
    assert {name for name in module_names() if name.startswith("bytes/")} == {*WHOLE, *ELSEWHERE}
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())


RIGHT = [
    ("Right", "llama3_1_8b", "P1D1", "n2 n16 n55 two_at_once chunked reused preempted_on_d hit1", "quick"),
    ("Right", "llama3_1_8b", "P1D2", "n55 two_at_once", "quick"),
    ("BacksOff", "gemma3_1b", "P1D1", "", "quick"),
    ("Right", "kimi_k2_5_eagle3", "P2D2", "n55", "quick"),
    ("Right", "qwen3_5_35b_a3b", "P1D2", "n2", "full"),
    ("ReferenceConnector", "qwen3_5_35b_a3b", "P1D2", "n2", "full"),
]


@pytest.mark.parametrize(
    ("connector", "geometry", "topology", "variants", "matrix"),
    RIGHT,
    ids=["-".join(row[:3]) for row in RIGHT],
)
def test_a_right_connector_passes_every_case(
    run_cases: Callable[..., CellRun],
    connector: str,
    geometry: str,
    topology: str,
    variants: str,
    matrix: str,
) -> None:
    run = run_cases(connector, geometry, topology, variants, matrix=matrix)
    assert set(of_whole_transfers(run).outcomes.values()) == {"PASS"}
    assert set(run.outcomes.values()) <= {"PASS", "NOT-APPLICABLE"}
    assert (run.verdict.word, run.verdict.exit_code) == ("CONFORMS", 0)


def test_tokens_that_no_load_can_bring_may_be_computed(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("ReferenceConnector", "gemma3_1b", "P1D1", "n63 n528", setup="b16x64", matrix="full")
    computed = {name for name, outcome in run.outcomes.items() if outcome != "PASS"}
    assert computed == {
        f"{case}[n528]"
        for case in (
            "d_computes_only_missing_tokens",
            "d_loads_all_whole_blocks",
            "attention_kv_arrives",
            "sliding_window_is_complete",
        )
    }
    assert {run.outcomes[name] for name in computed} == {"NOT-APPLICABLE"} and run.verdict.word == "CONFORMS"
