"""Mistakes about params, prefix hits, aborts, stores and MultiConnector, without a transfer."""

from __future__ import annotations

from tests.helpers.wrong import STORE, Right, Theme, Wrong, cases_of, on

MODULE = "tests.wrong_connectors.params"
GEOMETRIES = ("llama3_1_8b", "gemma3_1b", "qwen3_5_35b_a3b")
MODULES = (
    "protocol/kv_transfer_params",
    "protocol/prefix_cache_hits",
    "protocol/aborts",
    "protocol/multi_connector",
    "protocol/stores/saved_prompts",
    "protocol/multi_connector_halves",
)
FOR_EVER = "the request waits for ever: its load was announced, and none is ordered"
WRONG = [
    # Silence beside another connector is a warning.
    Wrong(
        "SilentWithoutALoad",
        on(
            "loads_nothing_if_another_connector_loads[first]",
            r"no step's metadata orders a notification to P",
        ),
        rules="KV-HIT-001",
    ),
    # Params.
    Wrong(
        "HandsStrangersOver",
        on(
            r"requests_without_own_params_are_ignored[p-\w+]",
            r"the connector returned \(True, \{'do_remote_prefill': True",
        ),
        rules="KV-PARAMS-001",
    ),
    Wrong(
        "LoadsByTransferId",
        on(
            r"requests_without_own_params_are_ignored[[pd]-of_another]",
            r"for a request with the params \{'transfer_id': .* the connector returned \(16, True\)",
        ),
        rules="KV-PARAMS-001",
    ),
    Wrong(
        "TrustsAddresses",
        on(
            r"corrupted_params_fail_only_their_request[missing]",
            rf"^with remote_host, remote_port missing: {FOR_EVER}$",
        ),
        rules="KV-PARAMS-002",
    ),
    Wrong(
        "TrustsGroups",
        on(
            r"corrupted_lists_fail_only_their_request[emptied]",
            r"a load of nothing: the metadata names no block to load from",
        ),
        rules="KV-PARAMS-002",
    ),
    Wrong(
        "TrustsGroups",
        on(
            r"corrupted_lists_fail_only_their_request[emptied]",
            r"^with remote_block_ids emptied: the request waits for a load of nothing",
        ),
        rules="KV-PARAMS-002",
        family="qwen3_5_35b_a3b",
        topology="P2D2",
    ),
    Wrong(
        "TrustsNames",
        {
            r"corrupted_params_fail_only_their_request[(list|object)]": (
                "^with remote_engine_id (list|object): on_new_request raised TypeError: unhashable "
                r"type: '(list|dict)' \(base_scheduler"
            )
        },
        rules="KV-PARAMS-002",
    ),
    Wrong(
        "RemembersTheUnusable",
        on(
            r"corrupted_params_fail_only_their_request "
            r"corrupted_lists_fail_only_their_request[(?!longer|negative|huge)\w+]",
            r"the connector of D\d+ remembers ever more requests that have ended, \d+ of \d+ by now: "
            r"connector_scheduler\.refused\.item",
        ),
        rules="KV-PARAMS-002",
        night=True,
    ),
    Wrong(
        "RemembersLoads",
        on(
            r"corrupted_params_fail_only_their_request "
            r"corrupted_lists_fail_only_their_request[(longer|negative|huge)\w*]",
            r"the connector of D\d+ remembers ever more requests that have ended, \d+ of \d+ by now: "
            r"connector_scheduler\.loaded\.\*",
        ),
        rules="KV-PARAMS-002",
        night=True,
    ),
    Wrong(
        "WantsEveryKey",
        {r"null_keys_may_be_left_out": r"^asked with \{'do_remote_decode': True\}, P hands nothing"},
        rules="KV-PARAMS-003",
    ),
    Wrong(
        "ReadsInOrder",
        {r"params_are_read_by_key[(reordered|with_more)]": r"D announces 0 tokens and orders another load"},
        rules="KV-PARAMS-004",
    ),
    Wrong(
        "MovesBlocks",
        {r"params_are_read_by_key[with_more]": r"D announces \d+ tokens and orders another load"},
        rules="KV-PARAMS-004",
    ),
    Wrong(
        "OrdersOnce",
        {
            r"params_are_read_by_key[twice]": (
                r"of two requests with the same params the second one is WAITING_FOR_REMOTE_KVS, and no step"
            )
        },
        rules="KV-PARAMS-004",
    ),
    Wrong(
        "TakesTurns",
        on(
            r"p_survives_params_of_an_earlier_turn p_survives_corrupted_params[(?!missing|null|empty)\w+]",
            rf"update_state_after_alloc raised AssertionError|{FOR_EVER}",
        ),
        rules="KV-PARAMS-005",
    ),
    # Hits.
    Wrong(
        "ForgetsTheBackoff",
        on(
            r"load_starts_after_the_local_hit[(?!2b\+1_2b|b\+1_b)[\w+]+]",
            r"without a hit D loads the tokens up to \d+ of \d+; with \d+ of them in its own cache",
        ),
        rules="KV-HIT-002",
        family="qwen3_5_35b_a3b",
        topology="P2D2",
    ),
    Wrong(
        "LeavesStatesOut",
        on(
            r"load_includes_every_state[(hit|diverged|one_token_left)]",
            r"after 2112 were announced, and the metadata names no slot of group 0 \(MambaSpec\)",
        ),
        rules="KV-HIT-003",
        family="qwen3_5_35b_a3b",
        topology="P2D2",
    ),
    Wrong(
        "LoadsTheLastToken",
        on(
            r"load_ends_where_p_stopped[(?!1$)[\w+-]+]",
            r"P computed \d+, and D loads \d+: the state is of another token",
        ),
        rules="KV-HIT-004",
        family="qwen3_5_35b_a3b",
        topology="P2D2",
    ),
    # Ends.
    *(
        Wrong(
            connector,
            on(
                r"abort_leaves_other_requests_alone[(loaded|failed|running|preempted)]",
                r"was aborted while \w+: request_finished_all_groups returned \(True, None\)$",
            ),
            rules="KV-ABORT-001",
            night=connector != "KeepsWhatLoads",
        )
        for connector in ("KeepsWhatLoads", "KeepsWhatLoadsBesideATensor")
    ),
    Wrong(
        "ForgetsTheOthers",
        {r"abort_leaves_other_requests_alone[\w+]": r"which loaded 0 tokens, computed 53$"},
        rules="KV-ABORT-001",
    ),
    Wrong(
        "WaitsForItsTwin",
        {
            "abort_leaves_its_twin_alone": r"^\S+ was aborted while it loaded, and \S+ has its params: in "
            r"\d+ steps get_num_new_matched_tokens knew no answer for \S+: it waits$"
        },
        rules="KV-ABORT-001",
    ),
    # Other connectors in MultiConnector.
    Wrong(
        "LoadsByBlocks",
        {r"loads_nothing_if_another_connector_loads[first]": r"orders a load into blocks \["},
        rules="KV-MULTI-001",
    ),
    Wrong(
        "ActsWhenAsked",
        {r"loads_the_same_as_alone[unsure_last]": r"beside a fake connector \(unsure_last\) 0"},
        rules="KV-MULTI-001",
    ),
    Wrong(
        "KeepsStrangers",
        {r"keeps_only_its_own_blocks[fake-\w+]": r"returned \(True, None\)"},
        rules="KV-MULTI-002",
    ),
    Wrong(
        "KnowsEveryReport",
        {r"keeps_only_its_own_blocks[fake-\w+]": r"nobody has kept"},
        rules="KV-LOAD-003",
    ),
    Wrong(
        "ReusesTheDict",
        {r"shares_the_params_dict[last]": r"params of request 1 have \['fake-0', 'fake-1'"},
        rules="KV-MULTI-003",
    ),
    Wrong(
        "IsTheOnlyOne",
        {r"handshake_metadata_reaches_scheduler_half[\w+]": r"and through MultiConnector nothing$"},
        rules="KV-MULTI-004",
    ),
]

BESIDE = [
    Wrong(
        "GivesUpWhatOthersLoad",
        {
            r"loads_of_another_connector_are_not_reported[(loaded|failed)-first]": r"the fake connector "
            r"reported its load as (loaded, and \S+ ended with 'error'|failed, and .* reported \S+, too)$"
        },
        rules="KV-MULTI-007",
    ),
    Wrong(
        "ListsFailedBlocks",
        {
            r"loads_of_another_connector_are_not_reported[.*]": r"^get_block_ids_with_load_errors\(\) is "
            r"\[\], a list, which MultiConnector cannot unite"
        },
        rules="KV-MULTI-007",
    ),
    Wrong(
        "ClosesTheGroup",
        {
            r"shutdown_ends_both_connectors[\w+-\w+]": r"shutdown\(\) of the worker half raised "
            r"AttributeError: 'MultiConnector' object has no attribute"
        },
        rules="KV-MULTI-008",
    ),
    Wrong(
        "EndsTheProcess",
        {
            r"shutdown_ends_both_connectors[.*]": r"(behind .* raised SystemExit: 0|before .* raised "
            r"SystemExit: 0, and shutdown\(\) of the other connector was not called)$"
        },
        rules="KV-MULTI-008",
    ),
]

GROWING = "growing_prompts_can_be_loaded"
SAVED = ("protocol/stores/saved_prompts",)
STORES = [
    Wrong(
        "AnnouncesTheRest",
        on(
            r"growing_prompts_can_be_loaded[forgotten]",
            r"tokens, \d+ of which were ever computed, \d+ were announced",
        ),
        rules="KV-STORE-001",
    ),
    Wrong(
        "CountsTokens",
        {r"unsaved_prompts_match_nothing[(?!nothing)\w+]": r"no engine has saved a block"},
        rules="KV-STORE-002",
    ),
    Wrong(
        "CountsQuestions",
        {r"repeated_lookup_returns_the_same": r"called four times for one request"},
        rules="KV-STORE-003",
    ),
    Right("Store", passes=f"{GROWING}[forgotten]", loads=True),
    # A store that announces nothing passes nothing about announcements.
    Right("Silent", not_applicable={f"{GROWING}[forgotten]", "repeated_lookup_returns_the_same"}),
]
# vLLM's example of a store announces what it has not.
EXAMPLE = [
    Wrong(
        "ExampleConnector",
        {
            f"{GROWING}[kept]": r"returned \(-16, False\)",
            f"{GROWING}[forgotten]": "start_load_kv raised FileNotFoundError",
        },
    )
]

HITS, ABORTS, MULTI, HALVES = (
    cases_of(module for module in MODULES if module.endswith(name))
    for name in ("prefix_cache_hits", "aborts", "multi_connector", "multi_connector_halves")
)
STATES = {"family": "qwen3_5_35b_a3b", "topology": "P2D2"}
BOTH = ("Right", "SureLater")
AT_NIGHT = [("Right", {}), ("Right", {"family": "gemma3_1b"}), ("SureLater", {}), ("SureLater", STATES)]
RIGHT = [
    Right("Right", **STATES),
    Right("SureLater", family="gemma3_1b"),
    *(Right(name, **cell, night=True) for name, cell in AT_NIGHT),
    Right("OrdersStatesLater", **STATES, cases=HITS),  # a load may be ordered in parts
    Right("LetsItsTwinGo", cases=ABORTS),  # a request may wait for the load of another one
    Right("NixlConnector", **STATES, cases=f"{HITS} {ABORTS}"),
    Right("NixlConnector", cases=MULTI),
]

cell = {"setup": "b16", "matrix": "full"}
THEMES = (
    Theme(
        "saved_prompts",
        MODULE,
        "protocol",
        STORES,
        GEOMETRIES,
        cell | {"profile": "store", "config": STORE},
        SAVED,
        longest=500,
    ),
    Theme("params", MODULE, "protocol", WRONG, GEOMETRIES, cell, MODULES, runs="about", longest=500),
    Theme("halves_beside", MODULE, "protocol", BESIDE, GEOMETRIES, cell, MODULES, runs="cases", longest=500),
    Theme("right_params", MODULE, "protocol", RIGHT, GEOMETRIES, cell, MODULES[:4], others="PASS"),
    Theme(
        "right_halves_beside",
        MODULE,
        "protocol",
        [Right(name, cases=HALVES) for name in BOTH],
        GEOMETRIES,
        cell,
        MODULES,
        others="PASS",
    ),
    Theme("example_of_a_store", MODULE, "protocol", EXAMPLE, GEOMETRIES, cell, SAVED),
)
