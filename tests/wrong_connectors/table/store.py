"""Mistakes of stores."""

from __future__ import annotations

import functools

from tests.helpers.wrong import ANY, NO_FAILURE, STORE, Right, Theme, Wrong, on

STORES, OTHERS = "tests.wrong_connectors.store", "tests.right_connectors.stores"
MOVED = r"token is (off by|mixed up)"  # rows of equal words make the distance ambiguous
of_engines = functools.partial(Wrong, family="llama", variants="two_at_once")
ENGINE = [
    of_engines(
        "NeverSaves", {"d_computes_only_missing_tokens": "announced nothing of a prompt that was saved"}
    ),
    of_engines("LoadsNothing", {"attention_kv_arrives": r"tokens 0-95 of all 4 layers was never written"}),
    of_engines("LoadsLateByOne", {"attention_kv_arrives": MOVED}),
    of_engines(
        "WrongLayer", {"attention_kv_arrives": r"layers\.0\.self_attn\.attn holds rows of model\.layers\.1\."}
    ),
    # rows of another prompt; whether some of its tokens are in this one, too, is chance
    of_engines(
        "FirstBlockOnly", {"attention_kv_arrives": rf"of 432 wrong rows: {MOVED}|tokens 69-95 .* nowhere"}
    ),
]

STATE, OUTPUT = "recurrent_state_arrives[n129]", "outputs_match_the_oracle[n129]"
UNOWNED = "unowned_blocks_are_unchanged[{}]"
of_states = functools.partial(Wrong, family="qwen3_5")
STATES = [
    of_states("ForgetsTheState", {STATE: "recurrent state never written", OUTPUT: ""}, variants="n129"),
    of_states(
        "FirstSlot",
        {
            STATE: "recurrent state never written",
            OUTPUT: "",
            UNOWNED.format("n129"): "block 0 is the null block",
        },
        variants="n129",
    ),
    of_states("NextLayer", {STATE: "recurrent state garbled", OUTPUT: ""}, variants="n129"),
    of_states(
        "CopiesEveryBlock", {UNOWNED.format("chunked"): "block 0 is the null block"}, variants="chunked"
    ),
    of_states(
        "LoadsForTheSecond",
        {"d_computes_only_missing_tokens[two_samples]": "announced nothing of a prompt that was saved"},
        variants="two_samples",
    ),
]

OTHER_KEYS, RESET = "other_keys_match_nothing", "reset_store_forgets"
MODEL, DTYPE = "other_models_match_nothing[model]", "other_models_match_nothing[dtype]"
SAME = "48 of 53 tokens were announced for a prompt with .*, and the same tokens were saved with"
KEYS = [
    Wrong("LacksSalt", {f"{OTHER_KEYS}[salt]": SAME.replace(".*", "cache_salt='user 1'")}),
    Wrong("LacksAdapter", {f"{OTHER_KEYS}[lora]": SAME.replace(".*", "LoRA 'a' of /adapters/a")}),
    Wrong("LacksPathOfAdapter", {f"{OTHER_KEYS}[lora]": SAME.replace(".*", "LoRA 'a' of .*-retrained")}),
    Wrong("LacksImages", {f"{OTHER_KEYS}[image]": SAME.replace(".*", "the image 5eed0001")}),
    Wrong("LacksEmbeddings", {f"{OTHER_KEYS}[embeddings]": SAME.replace(".*", "embeddings a")}),
    Wrong("LacksModel", {MODEL: "48 tokens were announced on an engine with another model"}),
    Wrong("LacksDtype", {DTYPE: "48 tokens were announced on an engine with another dtype"}),
    Wrong("ForgetsNothing", {RESET: "reset_cache returned True, and then 48 of 53 tokens were announced"}),
    Wrong("InheritsReset", {RESET: "reset_cache returned None, and then 48 of 53 tokens were announced"}),
]

AWAITED = "each_layer_is_loaded_when_awaited[two_at_once]"
ARRIVES = "attention_kv_arrives[two_at_once]"
FOUND, AS_MUCH = "full_graphs_find_loaded_kv[full_graphs]", "full_graphs_save_as_much[full_graphs]"
LATE = r"wait_for_layer_load\('model\.layers\.{}\.self_attn\.attn'\) returned before this layer of request 0"
LAYERS = [
    Wrong("WaitsForTheLayerBefore", {AWAITED: LATE.format(0), ARRIVES: "should have the KV"}),
    Wrong("NeverWaitsForTheLast", {AWAITED: LATE.format(31), ARRIVES: "should have the KV"}),
    Wrong("WaitsInTheFirstOnly", {AWAITED: LATE.format(1), ARRIVES: "should have the KV"}),
    Wrong("LoadsWithoutPiecewise", {FOUND: "replayed D's step as a full CUDA graph"}),
    Wrong("SavesWithoutPiecewise", {AS_MUCH: "of 17 tokens 0 were announced after .* and 16 after steps in"}),
    Wrong(
        "SavesInTheNextStep",
        {"attention_kv_arrives[reused]": "should have the KV"},
        variants="n55 reused",
    ),
    Wrong("SavesTheNextLayer", {"attention_kv_arrives[n55]": "should have the KV"}, variants="n55"),
]

UNSAVED = {"d_loads_all_whole_blocks", "attention_kv_arrives"}  # cases that need a load
SAME_ENGINE = [
    Wrong(
        "LosesAReport",
        {"completes": "the connector never reported the load as finished"},
        variants="n55",
        scale=0.1,
        blocked=UNSAVED
        | {
            "all_blocks_are_freed",
            "d_computes_only_missing_tokens",
            "rest_of_d_pool_is_unchanged",
            "p_pool_is_unchanged",
        },
    ),
    Wrong("LoadsAnother", {"attention_kv_arrives": "rows of another request"}, variants="n55"),
    Wrong("LosesLastBlock", {"attention_kv_arrives": "the last block was never written"}, variants="n55"),
    Wrong("SavesTooLate", {"attention_kv_arrives": "no byte of .* was written"}, variants="n55"),
    Wrong("KeepsBlocks", {"all_blocks_are_freed": "never reported the end of a save"}, variants="n55"),
    Wrong(
        "NeverSaves",
        {"d_computes_only_missing_tokens": "announced nothing of a prompt that was saved"},
        variants="n55",
        blocked=UNSAVED,
    ),
]

of_bytes = functools.partial(Wrong, variants="n55")
WHOLE = [
    of_bytes(
        "NeverSaves",
        {"d_computes_only_missing_tokens": "announced nothing of a prompt that was saved"},
        blocked=UNSAVED,
    ),
    of_bytes(
        "AnnouncesLess",
        {"d_loads_all_whole_blocks": "announced less than the whole blocks that were saved"},
    ),
    of_bytes("LoadsNothing", {"attention_kv_arrives": "no byte of .* was written"}),
    of_bytes(
        "LoadsLateByOne", {"attention_kv_arrives": r"blocks are mixed up \(0 holds 2, 1 holds 0, 2 holds 1\)"}
    ),
    of_bytes(
        "WrongLayer",
        on(
            "attention_kv_arrives",
            r"layers\.0\.self_attn\.attn holds rows of model\.layers\.1\.self_attn\.attn",
        ),
    ),
    of_bytes("SwapsPlanes", {"attention_kv_arrives": "K and V are exchanged"}),
    of_bytes(
        "CountsTokens",
        {"attention_kv_arrives[reused]": "the store takes one prompt for another"},
        variants="n55 reused",
    ),
    of_bytes("FirstBlockOnly", {"attention_kv_arrives": "rows of another request"}, variants="two_at_once"),
    of_bytes(
        "OverwritesHits",
        {"rest_of_d_pool_is_unchanged": r"a load wrote outside its own blocks: block \d+ holds tokens 0-15"},
        variants="hit1",
    ),
]

SAMPLED, UNDER_WAY = "sampled_tokens_are_loaded_as_computed", "prompts_can_be_loaded_while_they_are_saved"
OF_SAMPLES = (
    r"^after the load of \S+ \(request 0\), token {} in block \d+ of \S+ is .*\. Tokens 21 to 47 were "
    r"sampled for \S+, which computed KV of all of them but the last$"
)
TOO_SOON = (
    r"^asked after step 1 of another engine, which computes and saves the prompt: after the load of \S+ "
    r"\(request 0\), token 0 in block \d+ of "
)
GENERATED = [
    Wrong("SavesBeforeTheForward", {SAMPLED: OF_SAMPLES.format(31)}, rules="KV-BYTES-001"),
    Wrong("SavesWithTheLoads", {SAMPLED: OF_SAMPLES.format(31)}, rules="KV-BYTES-001"),
    Wrong("SavesTheLastToken", {SAMPLED: OF_SAMPLES.format(47)}, rules="KV-BYTES-001"),
    # A load of nothing that was sampled says nothing of it.
    Wrong("OneKeyForAll", {SAMPLED: r"\A(?!.*were sampled for)"}, rules="KV-BYTES-001"),
    Wrong("AnnouncesWhatItIsSaving", {UNDER_WAY: TOO_SOON}, rules="KV-STORE-001"),
    Wrong("WritesInPlace", {UNDER_WAY: TOO_SOON}, rules="KV-STORE-001"),
]
BY_PLACE = [  # a key without the blocks before it
    Wrong(
        "KeysByPlace",
        {
            "unsaved_prompts_match_nothing[another]": "of a prompt of 53 tokens, 16 of which were ever "
            "computed, 48 were announced"
        },
        rules="KV-STORE-002",
    )
]
SALT = [
    Wrong(
        "IgnoresSalt",
        {f"{OTHER_KEYS}[salt]": "were announced for a prompt with cache_salt='user 1'"},
    )
]

ABORT = "abort_of_a_load_leaves_others_alone"
KEEPS = "while loading: releases did not come to their end: P keeps blocks"
of_aborts = functools.partial(Wrong, rules="KV-ABORT-001", scale=0.2)
ABORTS = [
    of_aborts("ForgetsAbortedLoads", {f"{ABORT}[loading]": KEEPS}),
    of_aborts("ForgetsAbortedLoadsInMemory", {f"{ABORT}[loading]": KEEPS}, profile="same-engine"),
    of_aborts(
        "AbortsTheOthers",
        {f"{ABORT}[loading]": "requests of D did not .*: .* is WAITING_FOR_REMOTE_KVS"},
    ),
    of_aborts("ExpectsBlocks", {f"{ABORT}[waiting]": "while waiting: request_finished raised KeyError"}),
    *(
        Right(store, profile=profile, passes=f"{ABORT}[waiting] {ABORT}[loading]", loads=True)
        for store, profile in (
            (f"{OTHERS}:WholeBlocks", "store"),
            (f"{OTHERS}:LooksUpInTheBackground", "store"),
            (f"{OTHERS}:WritesBehind", "store"),
            (f"{OTHERS}:WholeBlocks", "same-engine"),
            (f"{OTHERS}:InMemory", "same-engine"),
            ("InMemoryBetweenSteps", "same-engine"),
            ("TakesAWhile", "store"),
        )
    ),
]

WHOLE_TRANSFERS = tuple(f"bytes/{name}" for name in ("start", "handover", "pool", "blocks"))
saves = {"profile": "store", "config": STORE}
THEMES = (
    Theme("stores_on_engines", f"{STORES}.stores", "engine", ENGINE, ("llama", "gemma3"), saves, others=ANY),
    Theme(
        "stores_of_states",
        f"{STORES}.states",
        "engine",
        STATES,
        ("qwen3_5", "kimi_linear"),
        saves,
        others=NO_FAILURE,
    ),
    Theme(
        "keys",
        f"{STORES}.keys",
        "protocol",
        KEYS,
        cell=saves | {"setup": "b16"},
        modules=("protocol/stores/keys",),
    ),
    Theme(
        "layers",
        f"{STORES}.layers",
        "bytes",
        LAYERS,
        cell=saves | {"setup": "b16", "variants": "two_at_once full_graphs"},
        modules=("bytes/layers", *WHOLE_TRANSFERS[1:]),
        others=NO_FAILURE,
    ),
    Theme(
        "same_engine",
        f"{STORES}.same_engine",
        "bytes",
        SAME_ENGINE,
        cell={"profile": "same-engine", "setup": "b16", "config": ""},
        modules=WHOLE_TRANSFERS,
    ),
    Theme(
        "stores", f"{STORES}.stores", "bytes", WHOLE, cell=saves | {"setup": "b16"}, modules=WHOLE_TRANSFERS
    ),
    Theme(
        "generated",
        f"{STORES}.generated",
        "protocol",
        GENERATED,
        cell=saves | {"setup": "b16"},
        modules=("protocol/stores/generated", "protocol/stores/under_way"),
        runs="cases",
    ),
    Theme(
        "by_place",
        f"{STORES}.keys",
        "protocol",
        BY_PLACE,
        cell=saves | {"setup": "b16"},
        modules=("protocol/stores/saved_prompts",),
    ),
    Theme(
        "salt",
        f"{STORES}.same_engine",
        "protocol",
        SALT,
        cell={"profile": "same-engine", "setup": "b16", "config": ""},
        modules=("protocol/stores/keys",),
        others=ANY,
    ),
    Theme(
        "aborts",
        f"{STORES}.aborts",
        "protocol",
        ABORTS,
        cell=saves | {"setup": "b16"},
        modules=("protocol/stores/aborts",),
        others=NO_FAILURE,
    ),
)
