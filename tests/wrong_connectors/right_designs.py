"""Right connectors of unusual designs, with the cases that could alarm, and wrong ones that look alike."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.helpers.wrong import STORE, Right, Theme, Wrong, on

HERE = "tests.right_connectors"
ENDS = "every_block_is_freed"
# of connectors for which many requests have to end
FEW = "plain-length p-length p-abort-running d-length d-failed missing begun"
REMEMBERS = {"remembers": 500}
right = partial(Right, not_applicable={"load_is_not_ordered_into_freed_blocks[one_token]"})


def passes(connector: str, cases: str, **more: Any) -> Right:
    """It passes these cases."""
    return right(connector, cases=cases, **more)


PROTOCOL = [
    passes(
        "Tombstones",
        (
            "memory_of_ended_requests_is_bounded every_block_is_freed abort_leaves_other_requests_alone "
            "corrupted_params_fail_only_their_request"
        ),
        variants=FEW,
    ),
    passes(
        "LongMemory",
        (
            "memory_of_ended_requests_is_bounded corrupted_params_fail_only_their_request "
            "memory_of_both_halves_is_bounded"
        ),
        variants=FEW,
        declared=REMEMBERS,
        night=True,
    ),
    passes(
        "RemembersLoads",
        "memory_of_ended_requests_is_bounded corrupted_params_fail_only_their_request",
        night=True,
    ),
    passes("ForgetsByTime", "memory_of_ended_requests_is_bounded every_block_is_freed", variants=FEW),
    passes(
        "LevelTriggered",
        (
            "load_is_not_ordered_into_freed_blocks freed_blocks_are_in_no_order "
            "metadata_does_not_change_after_its_step memory_of_ended_requests_is_bounded"
        ),
    ),
    passes(
        "RepeatsSends",
        (
            "freed_blocks_are_in_no_order metadata_does_not_change_after_its_step "
            "memory_of_ended_requests_is_bounded"
        ),
    ),
    passes(
        "PairsById",
        (
            "requests_without_own_params_are_ignored freed_blocks_are_in_no_order "
            "memory_of_ended_requests_is_bounded"
        ),
    ),
    passes(
        "RanksInParams",
        (
            "params_name_the_final_blocks handed_over_blocks_are_kept_until_sent "
            "aborted_prefill_is_freed_at_once params_are_read_by_key"
        ),
    ),
    passes(
        "TruthValues",
        (
            "returns_int_or_none_and_bool zero_tokens_is_never_async repeated_call_returns_the_same "
            "returns_bool_and_params aborted_prefill_is_freed_at_once "
            "handed_over_blocks_are_kept_until_sent requests_end_with_a_step_in_flight "
            "events_are_taken_once keeps_only_its_own_blocks loads_the_same_as_alone"
        ),
    ),
    passes(f"{HERE}.answers:NoEvents", "events_are_taken_once"),
    passes(
        "OwnKeys",
        (
            "params_survive_json requests_without_own_params_are_ignored params_are_read_by_key "
            "params_name_the_final_blocks"
        ),
    ),
    passes(
        "PacksParams",
        (
            "loads_nothing_if_another_connector_loads corrupted_params_fail_only_their_request "
            "params_are_read_by_key"
        ),
    ),
    passes(
        "PacksMetadata",
        (
            "corrupted_params_fail_only_their_request corrupted_lists_fail_only_their_request "
            "params_are_read_by_key p_survives_params_of_an_earlier_turn"
        ),
    ),
    passes(
        "NamesRuns", "load_fills_the_allocated_blocks params_name_the_final_blocks params_are_read_by_key"
    ),
    passes("CutsAgain", "on_new_request_leaves_request_unchanged params_name_the_final_blocks"),
    passes(
        "NoHeartbeat",
        "p_is_freed_without_a_load abort_before_the_load_frees_p load_starts_after_the_local_hit",
    ),
    passes(
        "KeepsEveryEnd",
        (
            "abort_leaves_other_requests_alone every_block_is_freed keeps_only_its_own_blocks "
            "load_starts_after_the_local_hit requests_that_end_together_are_all_freed "
            "requests_without_own_params_are_ignored requests_end_with_a_step_in_flight"
        ),
    ),
    passes(
        f"{HERE}.workers:HearsOfEnds",
        (
            "abort_leaves_other_requests_alone aborted_prefill_is_freed_at_once every_block_is_freed "
            "keeps_only_its_own_blocks load_starts_after_the_local_hit "
            "requests_that_end_together_are_all_freed requests_without_own_params_are_ignored "
            "requests_end_with_a_step_in_flight"
        ),
    ),
    passes(
        f"{HERE}.workers:HearsOfEndsOfD",
        (
            "abort_leaves_other_requests_alone every_block_is_freed keeps_only_its_own_blocks "
            "load_starts_after_the_local_hit requests_that_end_together_are_all_freed"
        ),
    ),
    passes(
        "DrainsOnAbort",
        (
            "aborted_prefill_is_freed_at_once abort_leaves_other_requests_alone every_block_is_freed "
            "memory_of_ended_requests_is_bounded"
        ),
    ),
]
INTERFACE = [
    passes("OwnEngineId", "halves_leave_engine_id_unchanged"),
    passes(
        "TruthValues",
        (
            "requires_piecewise_for_cudagraph_answers_any_configuration "
            "capability_properties_have_truth_values get_loaded_kv_cache_group_ids_names_loaded_groups "
            "optional_hooks_return_their_types external_cache_hit_sources_add_up "
            "engine_starts_in_vllm_call_order"
        ),
    ),
    passes(f"{HERE}.answers:NoEvents", "optional_hooks_return_their_types"),
    passes("StaticHooks", "hooks_accept_vllm_arguments engine_starts_in_vllm_call_order"),
    passes(
        "OfOneHalf",
        (
            "base_class_gets_constructor_arguments capability_properties_have_truth_values "
            "engine_starts_in_vllm_call_order"
        ),
    ),
    passes(
        "EndsWhenCollected",
        ("no_threads_ports_or_processes_left shutdown_twice_is_harmless next_engine_starts_on_same_port"),
    ),
    passes("InUseForAMoment", "no_threads_ports_or_processes_left next_engine_starts_on_same_port"),
    passes("OneContext", "no_threads_ports_or_processes_left next_engine_starts_on_same_port"),
    passes("ReplacesItsThread", "no_threads_ports_or_processes_left next_engine_starts_on_same_port"),
    passes("ReplacesAtLeisure", "no_threads_ports_or_processes_left next_engine_starts_on_same_port"),
    passes(
        "Tracked",
        ("no_threads_ports_or_processes_left shutdown_twice_is_harmless next_engine_starts_on_same_port"),
    ),
    passes("ForksByAServer", "no_threads_ports_or_processes_left next_engine_starts_on_same_port"),
]
NONE = (
    "returns_int_or_none_and_bool zero_tokens_is_never_async repeated_call_returns_the_same "
    "call_without_free_blocks_starts_no_load load_without_room_starts_later none_is_followed_by_an_answer "
    "loads_the_same_as_alone params_are_read_by_key aborted_load_is_reported_at_its_end"
)
ALONE = f"loads_the_same_as_alone {ENDS}"
MAY_CHANGE = "repeated_call_returns_the_same call_without_free_blocks_starts_no_load"
LATER = "load_without_room_starts_later"
NO_OTHER_LOAD, ANSWER = "unreachable_peer_delays_no_other_load", "none_is_followed_by_an_answer"
# They answer later than at once, or more often than once. What is in `fails` breaks a SHOULD.
ANSWERS = [
    *(Right(name, cases=NONE, night=True) for name in ("NoneBySteps", "NoneByTime", "NoneTrue")),
    Right("NoneForStrangers", cases=f"{NONE} requests_without_own_params_are_ignored", night=True),
    Right("OutOfOrder", cases=f"{ALONE} params_are_read_by_key preempted_blocks_are_never_read_again"),
    Right("StrictBookkeeping", cases="update_connector_output_takes_any_report"),
    Right("Retries", cases="failed_load_is_recomputed failed_load_ends_its_request"),
    Right("LoadsAgain", cases="announces_no_freed_blocks_after_the_load"),
    Right(
        "OneLoadAtATime",
        cases="load_without_room_starts_later params_are_read_by_key shares_the_params_dict "
        f"abort_leaves_other_requests_alone unreachable_peer_delays_no_other_request {NO_OTHER_LOAD}",
        fails=on(NO_OTHER_LOAD, ""),
    ),
    Right(
        "ComputesWhenBusy",
        cases="abort_leaves_other_requests_alone shares_the_params_dict loads_the_same_as_alone",
        fails=on("abort_leaves_other_requests_alone[begun] abort_leaves_other_requests_alone[loading]", ""),
        rules="KV-HANDOVER-003",
    ),
    Right(
        "OrdersLater",
        cases="load_fills_the_allocated_blocks loads_the_same_as_alone "
        "corrupted_lists_fail_only_their_request",
    ),
    Right(
        "AnswersMoreLater",
        cases=f"{ALONE} {MAY_CHANGE} {LATER}",
        fails=on(MAY_CHANGE, ""),
        not_applicable={LATER},
    ),
    Right("ServesOnce", cases=f"params_are_read_by_key {ALONE}"),
    # An answer that waits for own workers is told from one that never comes.
    *(Right(f"{HERE}.workers:{name}", cases=ANSWER) for name in ("MeetsFirst", "WantsAReceipt")),
    *(
        Wrong(
            f"{HERE}.workers:{name}",
            on(f"{ANSWER}[handed_over]", "cmpl-D0-0000: it waits$"),
            rules="KV-MATCH-006",
            cases=ANSWER,
        )
        for name in ("MeetsNobody", "LosesALookup")
    ),
]
LEFT = "no_threads_ports_or_processes_left"
INTERFACE += [
    *(
        Wrong(
            name,
            on(LEFT, r"there are still 2 threads \(poller, poller\)$"),
            rules="KV-SHUTDOWN-001",
            cases=LEFT,
            night=True,
        )
        for name in ("OneContextAndAThread", "ReplacesOnce")
    ),
    *(
        Wrong(name, on(LEFT, r"there are still 1 processes \(\d+ .+\)$"), rules="KV-SHUTDOWN-001", cases=LEFT)
        for name in ("TrackedAndAProcess", "LeavesAFork")
    ),
    # with several groups
    *(
        Right(name, cases="engine_starts_in_vllm_call_order", family="gemma3_1b")
        for name in ("TruthValues", "OfOneHalf")
    ),
]


def left(connector: str, what: str, **more: Any) -> Wrong:
    """Something of a live engine is left after its end."""
    return Wrong(connector, on(LEFT, f"after shutdown P still has {what}$"), family="llama", **more)


ends = partial(Right, family="llama")
ONE_PROCESS = r"1 processes \(\d+ .+\)"
ENGINES = [
    ends("EndsWhenCollected"),
    ends("InUseForAMoment"),
    ends("OneContext", night=True),
    ends("ReplacesItsThread", night=True),
    ends("ReplacesAtLeisure", night=True),
    left("OneContextAndAThread", r"2 threads \(poller, poller\)", night=True),
    ends("PoolOfThreads", night=True),
    left("ThreadOfEachEngine", r"1 threads \(poller-1\)", night=True),
    left("ThreadEndsLate", r"1 threads \(poller-1\)", night=True),
    left("ReplacesOnce", r"1 threads \(poller\)", night=True),
    ends("Tracked"),
    left("TrackedAndAProcess", ONE_PROCESS),
    ends("ForksByAServer"),
    left("LeavesAFork", ONE_PROCESS),
    # threads that some loads alone begin
    Right(f"{HERE}.workers:PoolForStates", family="qwen3_5", night=True),
    Wrong(
        f"{HERE}.workers:ThreadForStates",
        on(LEFT, r"after shutdown P still has 1 threads \(poller-1\)$"),
        family="qwen3_5",
        night=True,
    ),
    ends(f"{HERE}.workers:PoolForMany", night=True),
]

IN_FLIGHT, READ_AGAIN = "saved_prompts_load_with_a_step_in_flight", "preempted_blocks_are_never_read_again"
HOLDING = f"{IN_FLIGHT} {READ_AGAIN}"
HELD = [  # blocks that a store holds until they are saved
    Right("HoldsBlocks", cases=HOLDING),
    Right("SavesInBackground", cases=HOLDING),
    Wrong("KeepsWhatTheLastStepLacks", {IN_FLIGHT: "^with a step in flight"}, rules="KV-ASYNC-001"),
]
PAIRS = "bytes/start", "bytes/handover", "bytes/pool"
REUSED = [
    Right("SavesBeforeReuse", variants="n55 reused two_at_once", loads=True),
    Right(f"{HERE}.answers:LoadsAgain", variants="preempted_on_d", passes="completes"),
    Right("CountsBlocks", topology="P2D2", variants="n55", loads=True),
]
SAVED = [Right("SavesInBackground", variants="n17 n55 reused two_at_once preempted_on_p hit1", loads=True)]

ONCE = "each_rank_reports_once"
REPORTS = [  # what the scheduler half makes of a report
    Wrong(name, {ONCE: says}, rules="KV-RANK-001", scale=0.3, night=night)
    for name, says, night in (
        ("EndsWhatIsOrdered", "of D loaded wrong bytes", False),
        ("ForgetsSends", "rank 0 of P never named request .*, nor did update_connector_output", True),
        ("TakesOutLoads", "the ranks of D named request .* and update_connector_output took it out", True),
    )
]
FAILED_ONCE = "failed_load_is_reported_once"
LOST = [
    Wrong(
        "LosesFailures",
        {FAILED_ONCE: "^a load failed on the last rank of D, and no rank reported it as failed$"},
        rules="KV-RANK-003",
    ),
]
MACHINES = [
    *(Right(name, passes=FAILED_ONCE) for name in ("SharesAMachine", "LeavesWhatEnded")),
]

CELL = {"setup": "b16", "matrix": "full"}
LEASE = {"lease": "kv_lease_duration"}
GEOMETRIES = ("llama3_1_8b", "gemma3_1b")
HALVES = f"{HERE}.halves"
saves = CELL | {"profile": "store", "config": STORE}
quick = {"setup": "b16", "matrix": "quick"}
THEMES = (
    Theme("right_answers", f"{HERE}.answers", "protocol", ANSWERS, cell=CELL),
    Theme("bookkeeping", f"{HERE}.bookkeeping", "protocol", PROTOCOL, cell=CELL, others="PASS"),
    Theme(
        "bookkeeping_of_starts",
        f"{HERE}.bookkeeping",
        "interface",
        INTERFACE,
        GEOMETRIES,
        CELL,
        others="PASS",
        first=False,
    ),
    Theme(
        "bookkeeping_of_engines",
        f"{HERE}.bookkeeping",
        "engine",
        ENGINES,
        ("llama", "qwen3_5"),
        modules=("engine/shutdown",),
        others="PASS",
        first=False,
    ),
    Theme(
        "bookkeeping_of_bytes",
        f"{HERE}.bookkeeping",
        "bytes",
        [Right("ReadsNowAndThen", cases="load_ends_with_its_last_transfer")],
        cell=quick,
        others="PASS",
    ),
    Theme(
        "held",
        f"{HERE}.reuse",
        "protocol",
        HELD,
        cell=saves | quick,
        modules=("protocol/steps/asynchronous_scheduling", "protocol/stress/preemption"),
        runs="cases",
        first=False,
    ),
    Theme("reused", f"{HERE}.reuse", "bytes", REUSED, cell=CELL, modules=PAIRS, others="PASS"),
    Theme(
        "saved",
        f"{HERE}.reuse",
        "bytes",
        SAVED,
        cell=saves | quick,
        modules=("bytes/handover", "bytes/pool", "bytes/blocks"),
        others="PASS",
    ),
    Theme(
        "reports",
        f"{HALVES}.reports",
        "protocol",
        REPORTS,
        cell=quick | {"declared": LEASE},
        runs="cases",
        first=False,
    ),
    Theme(
        "machines",
        f"{HALVES}.machines",
        "protocol",
        MACHINES,
        cell=quick,
        modules=("protocol/peers/rank_reports",),
        first=False,
    ),
    Theme(
        "machines_that_lose", f"{HALVES}.machines", "protocol", LOST, cell=quick, runs="cases", first=False
    ),
)
