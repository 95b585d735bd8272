"""Mistakes in vLLM's step loop, and those that engines show in cases that are scripts."""

from __future__ import annotations

from functools import partial
from typing import Any

from pytest_kvconform.plan import module_names
from tests.helpers.wrong import ANY, Right, Theme, Wrong, cases_of, on
from tests.wrong_connectors.table.scheduler import GEOMETRIES, MODULE, STATES

STEPS_OF = tuple(
    f"protocol/steps/{name}" for name in ("asynchronous_scheduling", "hook_durations", "optional_hooks")
)
ENDS, DURATIONS = "requests_end_with_a_step_in_flight", "step_loop_hooks_return_at_once"
IN_FLIGHT = r"with a step in flight between schedule\(\) and update_from_output\(\), "
mistake = partial(Wrong, matrix="quick")
STEPS = [
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

PREEMPTED, BOUNDED = "preempted_blocks_are_never_read_again", "memory_of_both_halves_is_bounded"
MANY, FAR = "many_loads_in_flight_arrive", "large_block_ids_and_offsets_arrive"
CLOCKS, DRAFTS = "wall_clocks_may_differ_and_jump", "kv_arrives_beside_slots_of_drafts"
IDS = "any_request_id_is_handed_over"
DIFFER = "loads_are_made_although_clocks_differ"
KINDS, EMBEDS = "requests_of_every_kind_end", "loads_belong_to_their_own_embeddings[saved]"
OF_ANOTHER = r"\(request 1\), token \d+ in block \d+ of \S+ is token \d+ of request 0, computed by engine 0"
MORE = r"after 608 more requests, {}: {} half: {} holds \d+ things, \d+ more than 608 requests ago"
STRESS = "protocol/stress/"
LIVE_OF = tuple(name for name in module_names() if name.startswith(STRESS))
LIVE = [
    Wrong("IgnoresPreemptions", {PREEMPTED: OF_ANOTHER}, profile="store", rules="KV-PREEMPT-001"),
    Wrong(
        "ExtendsResumedTables",
        {PREEMPTED: r"\(request 1\), token \d+ in block \d+ of \S+ is"},
        profile="store",
        rules="KV-PREEMPT-001",
    ),
    Wrong("PacksOldBlocks", {PREEMPTED: OF_ANOTHER}, rules="KV-PREEMPT-001"),
    Wrong(
        "ForgetsLoads", {MANY: r"did not come to their end: .* WAITING_FOR_REMOTE_KVS"}, rules="KV-MANY-001"
    ),
    Wrong(
        "TagsOfFiveBits",
        {MANY: r"\(request \d+\), token 0 .* is token 0 of request \d+, computed"},
        rules="KV-MANY-001",
    ),
    Wrong("KeepsBlockIds", {BOUNDED: MORE.format("P0", "scheduler", r"tables\.\*")}, rules="KV-MANY-002"),
    Wrong("KeepsHandles", {BOUNDED: MORE.format("D0", "worker", "handles")}, rules="KV-MANY-002"),
    Wrong("LeaksLoads", {BOUNDED: MORE.format("D0", "scheduler", "kept")}, rules="KV-MANY-002"),
    Wrong("LeaksAborts", {BOUNDED: MORE.format("D0", "scheduler", "kept")}, rules="KV-MANY-002"),
    Wrong("KeepsAbortedReads", {BOUNDED: MORE.format("D0", "worker", "aborted")}, rules="KV-MANY-002"),
    Wrong("ReportsAbortsTwice", {BOUNDED: r"assert req_id in self\.requests"}, rules="KV-HOOK-003"),
    Wrong(
        "KeepsResults",
        {BOUNDED: MORE.format("P0", "worker", "records")},
        profile="store",
        rules="KV-MANY-002",
    ),
    Wrong(
        "PacksInto16Bits",
        {f"{FAR}[P]": r"is poison, as before the first write|no word"},
        rules="KV-NUMBERS-001",
    ),
    Wrong(
        "CountsBlocksInAByte", {f"{FAR}[P]": r"token 4080 .* is poison, as before"}, rules="KV-NUMBERS-001"
    ),
    Wrong(
        "LeavesFilesOpen",
        {BOUNDED: r"D0: process: table of open files holds \d+ things, \d+ more than 608 requests ago"},
        rules="KV-MANY-002",
    ),
    Wrong(
        "ClearsItsReports",
        {"two_engines_hand_over_both_ways": r"reported \['cmpl-.*'\] in finished_\w+, and .* became \["},
        rules="KV-ASYNC-001",
    ),
    Wrong("CutsAtColons", {IDS: r"with the id 'tenant:42', 9 characters: .*assert"}, rules="KV-IDS-001"),
    Wrong("HandsNoColonsOver", {IDS: r"with the id 'tenant:42', .* returns no kv_tr"}, rules="KV-IDS-001"),
    Wrong("DropsLongIds", {IDS: r"with the id 'longlong.*', 300 characters: .* keeps"}, rules="KV-IDS-001"),
    Wrong("LeasesByWallClock", {f"{CLOCKS}[p_jumps]": r"ended with an error"}, rules="KV-CLOCK-001"),
    Wrong(
        "ExpiresByWallClock",
        {f"{DIFFER}[d_ahead]": r"D loads nothing since a wall clock is wrong"},
        rules="KV-CLOCK-002",
    ),
    Wrong(
        "CountsFromTheEnd",
        {f"{DRAFTS}[PD]": r"token \d+ in block \d+ of \S+ is"},
        profile="store",
        rules="KV-SPEC-001",
    ),
    Wrong(
        "CountsOnTheOrder",
        {"wait_for_save_may_come_after_the_results": r"keeps blocks"},
        profile="store",
        rules="KV-SPEC-002",
    ),
    Wrong(
        "ProducersLoadNothing",
        {"two_engines_hand_over_both_ways": r"WAITING_FOR_REMOTE_KVS"},
        rules="KV-BOTH-001",
    ),
    Wrong(
        "NamesTheFirstRank", {"data_parallel_ranks_are_told_apart": r"ended with an error"}, rules="KV-DP-001"
    ),
    Wrong("CountsTokenIds", {f"{KINDS}[embeds]": r"on_new_request raised TypeError"}, rules="KV-KIND-001"),
    Wrong(
        "ReadsSamplingParams", {f"{KINDS}[pooling]": r"on_new_request raised Attribute"}, rules="KV-KIND-001"
    ),
    Wrong(
        "IgnoresEmbeddings",
        {"blocks_of_embeddings_are_freed": r"P keeps blocks, and nothing has changed for \d+ s"},
        rules="KV-BLOCKS-001",
    ),
    Wrong(
        "KeysOfEmbeds",
        {EMBEDS: r"request 0\), token 0 .* of request 2, computed by"},
        profile="store",
        rules="KV-KIND-002",
    ),
]

# An engine that hangs in a process of its own: its own hook and stack tell whose fault that is. Hooks of the
# other engine, which steps meanwhile, do not show that the case goes on.
HUNG = r"^{} did not answer within [0-9.]+ s {} \([a-z]+\.py:\d+\)$"
LIVE += [
    Wrong(connector, {case: HUNG.format(engine, place)}, rules="KV-HOOK-002", scale=scale)
    for connector, case, scale, engine, place in (
        ("HangsInAStepOfP", MANY, 0.3, "P", "in wait_for_save"),
        ("HangsInAStepOfD", MANY, 0.3, "D", "in start_load_kv"),
        ("HangsInGarbageOfP", BOUNDED, 0.3, "P", "in garbage collection"),
        ("HangsInTheStartOfP", MANY, 0.1, "P", "in wait_for_ever"),
    )
] + [
    Right(
        "NeedsAServer",
        cases=MANY,
        blocked={
            MANY: "^NeedsAServer cannot start here: its start waits for a server: start it, or configure its "
            "address$"
        },
        scale=0.1,
    )
]

# Announced tokens that vLLM drops, or lets load later, and sleep mode: rules since vLLM 0.33. On an older one
# `announced.py` brings what its scheduler lacks, and the rig calls the hooks of sleep mode.
SINCE = "0.33.0"
DROPPED, DEFERRED = "dropped_announcement_starts_no_load", "load_is_ordered_when_it_may_begin"
ANNOUNCED = [
    Wrong(
        "LoadsWhatItAnnounced",
        on(
            f"{DROPPED}[no_hit] {DROPPED}[hit]",
            r"update_state_after_alloc got 0 tokens, and the metadata names blocks \[\d+",
        ),
    ),
    Wrong(
        "PlansForOneStep",
        on(
            f"{DEFERRED}[later]",
            r"came a step after get_num_new_matched_tokens had announced \d+ tokens, and no step of \d+ "
            "orders",
        ),
    ),
    Wrong(
        "KeepsWhatItAnnounced",
        on(
            f"{DEFERRED}[never]",
            r"and before update_state_after_alloc: request_finished_all_groups returned \(True, None\), and "
            "no",
        ),
    ),
]
announces = partial(
    Right, passes=f"{DROPPED}[no_hit] {DROPPED}[hit] {DEFERRED}[later] {DEFERRED}[never]", matrix="full"
)
RIGHT_ANNOUNCED = [
    announces("Right", topology="P1D2"),
    announces("SureLater"),
    announces("ReferenceConnector"),
    announces("ReferenceConnector", family="gemma3_1b"),
    announces("ReferenceConnector", **STATES),
]
ARRIVES, TRUE = "kv_arrives_after_a_sleep", "supports_sleep_mode_has_a_truth_value"
SLEEP = [
    Wrong("UnregistersOnce", on(f"{ARRIVES}[P] {ARRIVES}[D]", "unregister_kv_caches raised AttributeError")),
    Wrong("StaysAsleep", on(f"{ARRIVES}[D]", "did not come to their end: .* WAITING_FOR_REMOTE_KVS")),
    Wrong("PublishesOnce", on(f"{ARRIVES}[P] {ARRIVES}[D]", "raised RuntimeError")),
    Wrong("RefusesToForget", on(f"{ARRIVES}[P] {ARRIVES}[D]", "reset_cache returned False")),
    Wrong("AnswersByMethod", on(TRUE, "is a method")),
    Right("Sleeps", passes=f"{TRUE} {ARRIVES}[P] {ARRIVES}[D]"),
    Right("Right", passes=TRUE),  # does not support it
]

OF_STORES = "saved_prompts_load_with_a_step_in_flight"
RIGHT_STEPS = [
    Right("Right"),
    Right("SureLater"),
    Right("YieldsEvents"),
    Right("ReferenceConnector"),
    Right("ReferenceConnector", **STATES),
    Right("SavesTails", **STATES),
    Right("SureLater", family="gemma3_1b"),
]


def live(connector: str, modules: str = "", **more: Any) -> Right:
    """It passes the cases of these modules."""
    return Right(connector, cases=cases_of(f"{STRESS}{module}" for module in modules.split()), **more)


OWN = "loads_belong_to_their_own_embeddings"
HANDED_OVER, SAVED = {f"{OWN}[handed_over]"}, {f"{OWN}[saved]"}  # prompts of embeddings are one or the other
stores = {"profile": "store", "not_applicable": HANDED_OVER}
hands_over = {"not_applicable": SAVED}
PASSES = "preemption numbers request_ids roles"
RIGHT_LIVE = [
    Right("Right", **hands_over),
    live("BlockStore", "preemption many numbers speculation kinds", **stores),
    live("LaterStore", "preemption many numbers request_ids speculation", **stores, night=True),
    live("PacksBlocks", PASSES),
    live("ParksReports", "roles"),
    live("RemembersSome", "many"),
    live("Rendezvous", PASSES, declared={"handover": "rendezvous"}),
    live("LayerWise", f"{PASSES} many", night=True),
    # Blocks may be kept for saves longer than the deadline of a case: twelve times for 1.6 s. At this scale a
    # case has 9 s while hooks are called.
    Right("SlowStore", cases=BOUNDED, scale=0.15, night=True, **stores),
    # vLLM's forward context asks the other ranks for their numbers of tokens unless it is told them.
    Right("Right", cases="data_parallel_ranks_are_told_apart", family="deepseek_v3"),
]
RIGHT_OF_VLLM = [live("NixlConnector", f"{PASSES} many kinds", night=True, **hands_over)]

cell = {"setup": "b16", "matrix": "full"}
THEMES = (
    Theme(
        "live",
        "tests.wrong_connectors.live",
        "protocol",
        LIVE,
        ("llama3_1_8b", "deepseek_v3"),
        cell | {"config": ""},
        LIVE_OF,
        runs="cases",
        others=ANY,
    ),
    Theme(
        "announced",
        MODULE,
        "protocol",
        ANNOUNCED,
        GEOMETRIES,
        cell | {"matrix": "quick"},
        (
            "protocol/steps/announced_tokens",
            "protocol/matched_tokens",
            "protocol/aborts",
            "protocol/request_finished",
        ),
        minor=SINCE,
        longest=500,
    ),
    Theme(
        "announced_and_right",
        MODULE,
        "protocol",
        RIGHT_ANNOUNCED,
        GEOMETRIES,
        cell,
        ("protocol/steps/announced_tokens",),
        others="PASS",
        minor=SINCE,
    ),
    Theme(
        "right_steps",
        MODULE,
        "protocol",
        RIGHT_STEPS,
        GEOMETRIES,
        cell,
        STEPS_OF,
        others="PASS",
        unsure={OF_STORES},
    ),
    Theme(
        "right_on_live_engines",
        "tests.wrong_connectors.live",
        "protocol",
        RIGHT_LIVE,
        ("llama3_1_8b", "deepseek_v3"),
        cell | {"config": ""},
        LIVE_OF,
        others="PASS",
    ),
    Theme(
        "vllm_on_live_engines",
        "tests.wrong_connectors.live",
        "protocol",
        RIGHT_OF_VLLM,
        cell=cell,
        modules=LIVE_OF,
        others="PASS",
    ),
    Theme(
        "sleep",
        "tests.wrong_connectors.live",
        "protocol",
        SLEEP,
        cell={"setup": "b16"},
        modules=("protocol/stress/sleep",),
        others=ANY,
        minor=SINCE,
    ),
    Theme("steps", MODULE, "protocol", STEPS, GEOMETRIES, cell, STEPS_OF, longest=500),
)
