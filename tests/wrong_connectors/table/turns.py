"""Mistakes in the next turn of a conversation, which P loads from D."""

from __future__ import annotations

import json
from functools import partial

from tests.helpers.wrong import NO_FAILURE, Theme, Wrong, on

TURNS = "bytes/turns/next_turn"
KEYS = {"lease": "kv_lease_duration", "turn_lease": "turn_s"}
FREED, READ, LATE = (
    "all_blocks_are_freed",
    "blocks_stay_until_p_has_read_them",
    "read_after_the_lease_is_detected",
)
ENDS, COMPUTES, LOADS = "both_turns_end", "p_computes_only_missing_tokens", "p_loads_what_d_has"
D_IS_RIGHT, SHORTER = "d_is_right_in_both_turns", "shorter_prompt_is_noticed"
NOBODY = "nobody will read them"
READ_FREED, LEASE_FREED, NAMED = (
    "d_frees_what_p_has_read",
    "d_frees_what_nobody_reads[no_turn]",
    "d_keeps_only_what_it_has_named",
)
turn = partial(Wrong, variants="next_turn no_turn", scale=0.2)
WRONG = [
    turn("MixesUpWhatItHasLoaded", {f"{D_IS_RIGHT}[next_turn]": "block"}),
    turn("NamesWrongBlocks", {f"{LOADS}[next_turn]": "block"}),
    turn("FreesBeforeTheRead", {f"{READ}[overwritten]": "request"}, variants="next_turn no_turn overwritten"),
    turn(
        "NeverFrees",
        {
            f"{READ_FREED}[next_turn]": "never notifies D",
            LEASE_FREED: "waits for a reader without a deadline",
            f"{FREED}[n17]": "their lease of 0.05 s is over",
        },
        variants="next_turn no_turn n17",
    ),
    turn("HoldsWhatItHasLoaded", {f"{ENDS}[next_turn]": "has not reported in finished_sending that P may"}),
    turn("FreesAtTheLeaseAlone", {f"{READ_FREED}[next_turn]": "never notifies D"}),
    turn("FreesWhatIsReadAlone", {LEASE_FREED: "waits for a reader without a deadline"}),
    turn("GivesThePromptAlone", {f"{COMPUTES}[next_turn]": ""}),
    turn("KeepsAndReturnsNothing", {f"{NAMED}[next_turn]": NOBODY, f"{COMPUTES}[next_turn]": ""}),
    turn(
        "KeepsWhatWasAborted", {f"{NAMED}[aborted_on_d]": NOBODY}, variants="next_turn no_turn aborted_on_d"
    ),
    turn(
        "AnnouncesAgain",
        on(f"{ENDS}[preempted] {ENDS}[late-recompute]", "never reported"),
        variants="next_turn no_turn preempted late-recompute",
    ),
    turn("PairsLastBlocks", {f"{SHORTER}[shorter]": "block is off by"}, variants="next_turn no_turn shorter"),
    turn("ServesWhatIsGone", {f"{LATE}[late-fail]": ""}, variants="next_turn no_turn late-fail"),
]

DECLARED = {"features": json.dumps({"bidirectional": True}), **KEYS}
THEMES = (
    Theme(
        "turns",
        "tests.wrong_connectors.turns.mistakes",
        "bytes",
        WRONG,
        cell={"setup": "b16", "declared": DECLARED},
        modules=(TURNS,),
        also=FREED,
        others=NO_FAILURE,
    ),
)
