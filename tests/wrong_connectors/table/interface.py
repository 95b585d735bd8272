"""Mistakes in what a connector is, and in how it starts and ends."""

from __future__ import annotations

from pytest_kvconform.plan import module_names
from tests.helpers.wrong import Right, Theme, Wrong, on

GEOMETRIES = ("llama3_1_8b", "gemma3_1b", "qwen3_5_35b_a3b", "kimi_k2_5_eagle3")
MODULES = tuple(name for name in module_names() if name.startswith("interface/"))
NO_RANK = r"on_new_request raised AssertionError: tensor model parallel group is not initialized"
NO_LAYERS = (
    r"__init__ raised AttributeError: '\w+Spec' object has no attribute 'kv_cache_specs' "
    r"\(halves\.py:\d+\)"
)

NO_RANK_PUBLISHES = "set_xfer_handshake_metadata_takes_any_ranks[no_rank]"
# of a connector that transfers nothing
NOTHING = (
    "scheduler_half_runs_without_worker_half engine_starts_in_vllm_call_order "
    "register_kv_caches_takes_every_layer"
)
WRONG = [
    # The class.
    Wrong(
        "SwapsTheRoles",
        on(
            "base_class_gets_constructor_arguments",
            r"the base class of the (scheduler|worker) half has .* as its role, and vLLM built",
        ),
    ),
    Wrong(
        "TakesNoKeywords",
        on(
            "hooks_accept_vllm_arguments",
            r"has start_load_kv\(self, forward_context\): got an unexpected keyword argument",
        ),
    ),
    Wrong(
        "WaitsInACoroutine",
        {"hooks_accept_vllm_arguments": r"WaitsInACoroutine\.on_new_request is a coroutine"},
    ),
    Wrong(
        "TakesItselfInAStaticMethod",
        on(
            "hooks_accept_vllm_arguments",
            r"has wait_for_layer_load\(self, layer_name\): missing a required argument: 'layer_name'",
        ),
    ),
    Wrong(
        "ForgetsToInherit",
        on(
            "supports_hma_matches_hybrid_allocator",
            r"does not inherit SupportsHMA, so vLLM turned the hybrid memory allocator off",
        ),
        family="gemma3_1b",
    ),
    # What it says of itself.
    Wrong(
        "NeedsAKey",
        on(
            "requires_piecewise_for_cudagraph_answers_any_configuration",
            r"requires_piecewise_for_cudagraph raised KeyError: 'layerwise'",
        ),
    ),
    Wrong(
        "PromisesByMethod",
        on(
            "capability_properties_have_truth_values",
            r"requires_kv_delivery of the \w+ half is a method and no property",
        ),
    ),
    Wrong(
        "LoadsTheFirstGroup",
        {
            "get_loaded_kv_cache_group_ids_names_loaded_groups": (
                r"names \[0\] of the groups \[0, 1.*\]: vLLM zeroes new blocks of the others"
            )
        },
        family="qwen3_5_35b_a3b",
        topology="P2D2",
    ),
    Wrong(
        "NamesGroupsOnce",
        on(
            "get_loaded_kv_cache_group_ids_names_loaded_groups",
            r"returned <tuple_iterator object at \w+>, and vLLM tests which group numbers are in it",
        ),
    ),
    Wrong(
        "CountsSourcesTwice",
        {
            "external_cache_hit_sources_add_up": (
                r"get_external_cache_hit_sources\(request, 1\) returned \{.*: 1, .*: 1\}"
            )
        },
    ),
    Wrong(
        "PushesForEver",
        {"optional_hooks_return_their_types": r"has_pending_push_work\(\) is true with no request left"},
    ),
    Wrong(
        "HidesAFailedReset",
        {"optional_hooks_return_their_types": r"reset_cache\(\) returned 0: vLLM takes everything but False"},
    ),
    Wrong(
        "GivesOtherEvents",
        {"optional_hooks_return_their_types": r"take_events\(\) returned a dict, which is no KVCacheEvent"},
    ),
    Wrong(
        "AsksForNoLayout",
        {"get_required_kvcache_layout_names_a_layout": r"returned 'BHND'; vLLM knows LBHNC, LBNHC"},
    ),
    Wrong(
        "FlattensMemory",
        on(
            "register_kv_caches_takes_resolved_layout[LBNHC]",
            r"register_kv_caches raised RuntimeError: view size is not",
        ),
    ),
    # The start.
    Wrong(
        "SharesTheProcess",
        on(
            "worker_half_starts_without_scheduler_half",
            r"get_handshake_metadata raised RuntimeError: there is no scheduler half",
        ),
    ),
    Wrong(
        "PlaysBothRoles",
        on(
            "scheduler_half_runs_without_worker_half",
            r"the scheduler half built a worker half in its own process",
        ),
    ),
    Wrong(
        "AsksForItsRank",
        dict.fromkeys(
            (
                "scheduler_half_runs_without_worker_half",
                "get_loaded_kv_cache_group_ids_names_loaded_groups",
                "optional_hooks_return_their_types",
                "external_cache_hit_sources_add_up",
            ),
            NO_RANK,
        ),
    ),
    Wrong(
        "ReadsLayersOfGroups",
        dict.fromkeys(
            (
                "engine_starts_in_vllm_call_order",
                "scheduler_half_runs_without_worker_half",
                "get_loaded_kv_cache_group_ids_names_loaded_groups",
            ),
            NO_LAYERS,
        ),
        family="kimi_k2_5_eagle3",
        topology="P2D2",
        matrix="full",
    ),
    Wrong("CountsInWords", {"engine_starts_in_vllm_call_order": r"get_finished_count\(\) returned 'all'"}),
    Wrong(
        "SpeaksUnasked",
        {
            "engine_starts_in_vllm_call_order": (
                "without any request the worker half reports finished_recving = "
                r"\{'cmpl-of-another-engine'\}"
            )
        },
    ),
    Wrong(
        "ChangesTheEngineId",
        on(
            "halves_leave_engine_id_unchanged",
            r"vLLM gave the engine the engine_id \S+, and kv_transfer_config after the start of the worker "
            r"half has \S+",
        ),
    ),
    Wrong(
        "RefusesInSilence",
        on(
            "set_xfer_handshake_metadata_takes_any_ranks[two_stages]",
            r"set_xfer_handshake_metadata_pp_aware raised ValueError \(halves",
        ),
    ),
    Wrong(
        "Upstream",
        on(
            "start_on_taken_port_does_not_hang",
            r"another one with the same port still waits in set_xfer_handshake_metadata after 2 s",
        ),
    ),
    Wrong(
        "PublishesALock",
        on(
            "worker_metadata_survives_pickle",
            r"a NixlHandshakePayload of get_handshake_metadata does not survive pickle",
        ),
    ),
    Wrong(
        "LooksEveryNameUp",
        on(
            "register_kv_caches_takes_every_layer",
            r"register_kv_caches raised KeyError: 'model\.layers\.35\.self_attn\.attn'",
        ),
    ),
    Wrong(
        "HandsOverEveryGroup",
        on(
            "untransferred_groups_stay_out",
            r"group 6 is not transferred .*, and its blocks \[\d+.*\] are among what P hands over",
        ),
        family="gemma3_1b",
    ),
    # The end.
    Wrong(
        "LeavesAThread",
        on(
            "no_threads_ports_or_processes_left",
            r"after shutdown of both halves there are still 1 threads \(poller\)",
        ),
    ),
    Wrong(
        "EndsOnce",
        on(
            "shutdown_twice_is_harmless",
            r"shutdown raised AttributeError: 'EndsOnce' object has no attribute 'running'",
        ),
    ),
    Wrong(
        "EndsWhatItRegistered",
        on(
            "shutdown_twice_is_harmless[half_built]",
            r"shutdown raised AttributeError: .* no attribute 'registered'",
        ),
    ),
    Wrong(
        "KeepsAFile", {"next_engine_starts_on_same_port": r"has 2 more open files than after the first one's"}
    ),
    *(
        # its workers publish
        Right("Right", family=family, topology=topology, matrix=matrix, unsure={NO_RANK_PUBLISHES})
        for family, topology, matrix in (
            ("llama3_1_8b", "P1D1", "quick"),
            ("llama3_1_8b", "P1D2", "full"),
            ("gemma3_1b", "P1D1", "quick"),
            ("qwen3_5_35b_a3b", "P2D2", "quick"),
            ("kimi_k2_5_eagle3", "P2D2", "full"),
        )
    ),
    *(Right("Nothing", family=family, passes=NOTHING) for family in ("llama3_1_8b", "gemma3_1b")),
]

THEMES = (
    Theme(
        "interface",
        "tests.wrong_connectors.interface.halves",
        "interface",
        WRONG,
        GEOMETRIES,
        {"setup": "b16"},
        MODULES,
        runs="about by day",
        longest=500,
    ),
)
