"""Cases that no record names, and the tests that prove that they can fail."""

SERVERS = "tests/accuracy/test_wrong_connectors.py"
# "<tier>/<module>::<case>" -> "path::test"
PROVED_BY = {
    "accuracy/answers::every_question_is_answered": (
        f"{SERVERS}::test_a_request_that_is_never_answered_is_the_connectors_doing"
    ),
    "accuracy/answers::answers_equal_those_of_d_alone": (
        f"{SERVERS}::test_one_question_that_is_wrong_each_time_is_named"
    ),
    "accuracy/answers::as_many_answers_are_right": (
        f"{SERVERS}::test_wrong_blocks_in_every_request_lose_right_answers"
    ),
    "accuracy/answers::as_many_drafts_are_accepted": (
        f"{SERVERS}::test_wrong_kv_of_a_draft_model_changes_what_is_accepted"
    ),
    "accuracy/evidence::each_question_is_loaded": (
        f"{SERVERS}::test_a_d_that_computes_everything_has_no_evidence"
    ),
    "accuracy/evidence::all_whole_blocks_are_loaded": (
        f"{SERVERS}::test_a_d_that_loads_one_block_alone_is_told_how_much_it_lacks"
    ),
    "accuracy/evidence::moved_bytes_are_counted": f"{SERVERS}::test_a_metric_that_does_not_grow_is_named",
    # upstream itself breaks it
    "engine/bytes::sliding_window_is_complete": (
        "tests/engine/test_upstream.py::test_the_window_is_torn_at_exactly_the_lengths_of_the_formula"
    ),
}
# Cases that nothing makes fail, and why.
UNPROVEN = {
    "accuracy/answers::answers_of_a_deployment_equal_those_of_d_alone": (
        "it asks real checkpoints, and shares the function of answers_equal_those_of_d_alone"
    ),
}
# "<tier>::<case>" of those whose every mistake is found by another case of the tier, too, and why.
NEVER_ALONE = {
    "protocol::aborted_load_waits_for_the_last_rank": "a report is lost on one rank as well",
    "protocol::call_without_free_blocks_starts_no_load": "an answer that changes shows with free blocks, too",
    "bytes::each_layer_is_loaded_when_awaited": "a layer that is late is a wrong byte, too",
    "protocol::failed_load_is_recomputed": "a load that is ordered again reads freed blocks, too",
    "protocol::load_ends_with_the_last_rank": "a count is one for loads and sends",
    "protocol::load_without_room_starts_later": "an answer that changes shows with room, too",
    "protocol::mixed_requests_with_a_step_in_flight": "it mixes the requests of other cases",
    "protocol::p_survives_params_of_an_earlier_turn": "corrupted params are taken like those of a turn",
    "protocol::repeated_call_returns_the_same": "it shows without free blocks, too",
    "protocol::restarted_peer_is_a_new_engine": "P that has restarted is P whose process has died",
    "protocol::send_ends_with_the_last_rank": "a count is one for loads and sends",
    "protocol::unreachable_peer_delays_no_other_request": "a load is a request, too",
    "engine::recurrent_state_arrives": "the answers differ, too",
}
