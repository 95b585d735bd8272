"""Mistakes that real engines with models show."""

from __future__ import annotations

import functools

from tests.helpers.wrong import Theme, Wrong, on

STOPPED = {
    "all_blocks_are_freed",
    "attention_kv_arrives",
    "unowned_blocks_are_unchanged",
    "d_computes_only_missing_tokens",
    "d_loads_all_whole_blocks",
    "outputs_match_the_oracle",
}  # cases that need a hand-over that ended
DUMB = {"attention_kv_arrives", "unowned_blocks_are_unchanged", "d_loads_all_whole_blocks"}  # need given KV
mistake = functools.partial(Wrong, family="llama", variants="n200")
# the case about windows does not apply
keeps_all = functools.partial(Wrong, family="gemma3", variants="n200", unsure={"sliding_window_is_complete"})


def bytes_and_outputs(says: str) -> dict[str, str]:
    """The mistakes here are so large that the outputs of D differ, too."""
    return {"attention_kv_arrives": says, "outputs_match_the_oracle": ""}


SHORT = 0.2
# A D that does not read in time has P's address, or its blocks, only after its last step. It tells P that it
# is done in the next step, which may not come.
FIRST_WORD = {"all_blocks_are_freed"}
MOVED = r"token is (off by|mixed up)"  # rows of equal words make the distance ambiguous

WRONG = [
    # What is in D's cache.
    mistake(
        "MovesNothing",
        bytes_and_outputs(r"tokens 0-\d+ of all 4 layers was never written"),
        variants="n33 n200",
        scale=SHORT,
        unsure=FIRST_WORD,
    ),
    mistake(
        "MovesNothing", bytes_and_outputs("never written"), topology="P2D1", scale=SHORT, unsure=FIRST_WORD
    ),
    mistake("LateByOne", bytes_and_outputs(rf"{MOVED}.*\+32"), variants="n64 n200"),
    mistake("DropsTail", bytes_and_outputs(r"tokens 192-198 of all 4 layers was never written")),
    mistake("SwapsBlocks", {"attention_kv_arrives": rf"in all 1024 rows: {MOVED}.*\+32, 512 times"}),
    mistake("SwapsHeads", bytes_and_outputs("head 0 and head 1 are exchanged")),
    mistake(
        "SwapsLayers",
        bytes_and_outputs(
            r"model\.layers\.0\.self_attn\.attn holds rows of model\.layers\.1\.self_attn\.attn"
        ),
    ),
    mistake(
        "ForgetsLayer", bytes_and_outputs(r"tokens 0-\d+ of model\.layers\.3\.self_attn\.attn holds zeros")
    ),
    mistake("ZeroesHits", {"outputs_match_the_oracle": "log-probabilities differ"}, variants="full_hit"),
    mistake(
        "OneBit",
        {
            "attention_kv_arrives": (
                r"token 5 of model\.layers\.3\.self_attn\.attn, K only, head 1 only holds bytes of "
                "no row that the prefiller has of this request"
            )
        },
    ),
    mistake(
        "OneBit",
        {"attention_kv_arrives": r"token 5 of model\.layers\.5\.self_attn\.attn, K only"},
        family="gemma3",
    ),
    mistake(
        "HalfAWindow",
        bytes_and_outputs(r"tokens 168-191 of model\.layers\.0\.self_attn\.attn.* was never written"),
        family="gemma3",
    ),
    mistake(
        "WritesNull", {"unowned_blocks_are_unchanged": "blocks 0 of D changed.*block 0 is the null block"}
    ),
    mistake(
        "WritesOutside",
        {"unowned_blocks_are_unchanged": r"blocks \d+ of D changed, which belong to no request"},
    ),
    # The draft model's KV: no token differs, since the model verifies what the draft proposes.
    *(
        mistake(
            "LeavesDraft",
            {"attention_kv_arrives": r"tokens 0-\d+ of model\.layers\.4\.self_attn\.attn was never written"},
            family=family,
            matrix="full",
            variants="n17 n100",
        )
        for family in ("kimi_k2_5_eagle3", "llama_mla_eagle3")
    ),
    mistake(
        "DraftLateByOne",
        {"attention_kv_arrives": "in all 12 rows: token is off by -16$"},
        family="kimi_k2_5_eagle3",
        variants="n100",
    ),
    mistake(
        "DraftLateAcrossRanks",
        {"attention_kv_arrives": "in all 12 rows: token is off by -16$"},
        family="kimi_k2_5_eagle3",
        topology="P1D2",
        variants="n100",
    ),
    mistake(
        "DraftLateAcrossRanks",  # of which every rank holds the draft's rows
        {"attention_kv_arrives": "in all 6 rows: token is off by -16$"},
        family="llama_mla_eagle3",
        topology="P1D2",
        matrix="full",
        variants="n100",
    ),
    # The recurrent state.
    mistake(
        "RollsConvolution",
        {
            "recurrent_state_arrives": "convolution K garbled, convolution Q garbled, convolution V garbled$",
            "outputs_match_the_oracle": "",
        },
        family="qwen3_5",
        variants="two_at_once",
    ),
    mistake(
        "ZeroesState",
        {"recurrent_state_arrives": "recurrent state zero$", "outputs_match_the_oracle": ""},
        family="qwen3_5",
        variants="two_at_once",
    ),
    mistake(
        "LoadsStatesLate",
        {"recurrent_state_arrives": "never written", "outputs_match_the_oracle": ""},
        family="qwen3_5",
        variants="n63",
    ),
    mistake(
        "NoTruncation",
        {
            "recurrent_state_arrives": r"D runs \+1 tokens through a state that includes them already",
            "outputs_match_the_oracle": "",
        },
        family="qwen3_5",
        variants="n63",
    ),
    mistake(
        "LeavesState",
        {"recurrent_state_arrives": "recurrent state never written$", "outputs_match_the_oracle": ""},
        family="kimi_linear",
        topology="P1D2",
        variants="n288",
    ),
    # Latent attention.
    mistake(
        "ForgetsLatent",
        bytes_and_outputs(r"tokens 0-286 of model\.layers\.3\.self_attn, rank 1 only holds zeros"),
        family="kimi_linear",
        topology="P1D2",
        variants="n288",
    ),
    # When and what it reports.
    mistake("ReportsEarly", bytes_and_outputs("never written"), scale=SHORT, unsure=FIRST_WORD),
    mistake(
        "NeverFinishes",
        {"completes": "the connector never reported the load as finished"},
        blocked=STOPPED,
        scale=SHORT,
    ),
    mistake(
        "ReportsTwice",
        {"completes": r"D raised AssertionError in _update_from_kv_xfer_finished \(scheduler.py:\d+\)"},
        blocked=STOPPED,
    ),
    mistake(
        "KeepsBlocks", {"all_blocks_are_freed": r"P still holds 7 of \d+ blocks and 1 requests"}, scale=SHORT
    ),
    mistake(
        "RecomputesQuietly",
        on(
            "d_computes_only_missing_tokens",
            "D recomputed the prompt: get_num_new_matched_tokens announced nothing",
        ),
        blocked=DUMB,
        variants="n63 n200",
        scale=SHORT,
        unsure=FIRST_WORD,
    ),
    mistake(
        "AnnouncesLess",
        {"d_loads_all_whole_blocks": "get_num_new_matched_tokens announced less than P had"},
    ),
    mistake(
        "AnnouncesMore",
        {"completes": r"D raised AssertionError in schedule \(scheduler.py:\d+\)"},
        blocked=STOPPED,
    ),
    mistake(
        "NoHandover",
        {"d_computes_only_missing_tokens": "request_finished returned None for its params"},
        blocked=DUMB,
    ),
    # How it fails.
    mistake(
        "CrashesInLoad",
        {"completes": r"D was killed by SIGSEGV in start_load_kv \(failures.py:\d+\)"},
        blocked=STOPPED,
    ),
    mistake(  # both workers die at once, and their stacks may be mixed in the log
        "CrashesInLoad",
        {"completes": r"worker \d \(process \d+\) was killed by SIGSEGV|in start_load_kv"},
        topology="P1D2",
        blocked=STOPPED,
    ),
    mistake(
        "HangsInLoad",
        {"completes": r"D did not answer within \d s in start_load_kv \(failures.py:\d+\)"},
        blocked=STOPPED,
        scale=SHORT,
    ),
    mistake(
        "HangsInLoad",
        {"completes": r"D did not answer within \d s in start_load_kv \(failures.py:\d+\)"},
        topology="P1D2",
        blocked=STOPPED,
        scale=SHORT,
    ),
    mistake(
        "RaisesInLoad",
        {"completes": r"D raised RuntimeError in start_load_kv \(failures.py:\d+\): the wire is cut"},
        blocked=STOPPED,
    ),
    mistake(
        "LeavesInLoad",
        {"completes": r"D left with exit code 1 in start_load_kv \(failures.py:\d+\)"},
        blocked=STOPPED,
    ),
    mistake(
        "RaisesAtStart",
        {"engines_start": r"P did not start: ValueError in __init__ \(failures.py:\d+\): no such fabric"},
        blocked=STOPPED | {"completes"},
    ),
    mistake(
        "CrashesAtStart",
        {"engines_start": r"P was killed by SIGSEGV in register_kv_caches \(failures.py:\d+\)"},
        blocked=STOPPED | {"completes"},
    ),
    # How it ends.
    mistake(
        "LeavesThread",
        {"no_threads_ports_or_processes_left": r"after shutdown P still has 1 threads \(kv-forgotten\)"},
        variants="two_at_once",
        night=True,
    ),
    mistake(
        "LeavesPort",
        on(
            "no_threads_ports_or_processes_left",
            r"after shutdown P still has 1 listening ports \(127\.0\.0\.1:\d+\)",
        ),
        variants="two_at_once",
    ),
    mistake(
        "LeavesProcess",
        {"no_threads_ports_or_processes_left": r"after shutdown P still has 1 processes \(\d+ sleep\)"},
        variants="two_at_once",
        scale=SHORT,  # too short for the moment in which processes may end, which comes on top
    ),
    mistake(
        "RaisesInShutdown",
        {"no_threads_ports_or_processes_left": "shutdown of P raised OSError: the fabric was gone"},
        variants="two_at_once",
    ),
    mistake(
        "RankRaisesInShutdown",
        {"no_threads_ports_or_processes_left": "shutdown of D raised OSError: the fabric of rank 1 was gone"},
        variants="two_at_once",
        topology="P1D2",
    ),
    mistake(
        "DiesInShutdown",
        {"no_threads_ports_or_processes_left": "P left with exit code 3 in shutdown"},
        variants="two_at_once",
    ),
    mistake(
        "HangsInShutdown",
        on(
            "no_threads_ports_or_processes_left",
            r"P did not answer within \d s in shutdown \(shutdown.py:\d+\)",
        ),
        variants="two_at_once",
        scale=SHORT,
    ),
    # What it is.
    keeps_all("NoHMA", {"hybrid_allocator_stays_on": "NoHMA lacks HMA in this configuration"}),
    keeps_all("LoadsTheWindow", {"hybrid_allocator_stays_on": "", **bytes_and_outputs("")}),
]

THEMES = (
    Theme(
        "engine",
        "tests.wrong_connectors.engine",
        "engine",
        WRONG,
        families=(),
        others="PASS",
        leaves=True,
        first=False,
    ),
)
