"""Mistakes inside MultiConnector: of a child, and of MultiConnector itself."""

from __future__ import annotations

import json
from functools import partial

from tests.helpers.wrong import ANY, Right, Theme, Wrong, on

FAULTS = "tests.wrong_connectors.faults.transfers"
SHORT = 0.2  # of deadlines, where one of them has to be waited for
MODULE = "tests.wrong_connectors.multi.children"
MODULES = ("bytes/handover", "bytes/pool", "bytes/blocks")
REFERENCE = {"kv_connector": "ReferenceConnector", "kv_connector_module_path": "reference_connector"}


def store(name: str) -> dict[str, str]:
    return {"kv_connector": name, "kv_connector_module_path": MODULE}


def inside(*children: dict[str, str]) -> str:
    both = [child | {"kv_role": "kv_both"} for child in children]
    return json.dumps({"kv_connector_extra_config": {"connectors": both}})


NEVER_LOADED = "P had computed and saved the same prompt; 0 tokens came from the store"
mistake = partial(Wrong, scale=SHORT)
# The profile is that of the child which shows the mistake.
MULTI = [
    mistake(
        "GivesTheLoadToTheLast",
        {"completes[n17]": "D's request is WAITING_FOR_REMOTE_KVS"},
        profile="p2p",
    ),
    mistake("LoadsWithTheFirst", {"attention_kv_arrives[n55]": "48 tokens"}, profile="store"),
    mistake("SavesToTheFirst", {"d_computes_only_missing_tokens[n55]": NEVER_LOADED}, profile="store"),
]
FAILED = "failed_load_ends_its_request_alone"
INSIDE = [
    Wrong(
        "ListsWhatFailed",
        on(
            FAILED,
            r"^inside MultiConnector, .*D raised TypeError in get_block_ids_with_load_errors "
            r"\(multi_connector\.py:",
        ),
        rules="KV-MULTI-007",
    ),
    Wrong(
        "FailsNoneBeside",
        on(
            FAILED,
            "^inside MultiConnector, .*request 0 of 20 tokens: rank 0 of D should have the KV of tokens 0 to "
            "18 ",
        ),
        rules="KV-MULTI-007",
    ),
    *(
        Right(connector, topology=topology, passes=f"{FAILED}[first] {FAILED}[last]")
        for topology in ("P1D1", "P1D2")
        for connector in (
            "reference_connector:ReferenceConnector",
            "tests.right_connectors.answers:FailsByBlocks",
            f"{FAULTS}:Right",
        )
    ),
    # It moves bytes without NIXL, and has kvconform_fault: MultiConnector has no such hook.
    Right(f"{FAULTS}:TcpPull", passes=f"{FAILED}[first] {FAILED}[last]"),
]
cell = {"setup": "b16", "variants": "n17 n55 two_at_once"}
THEMES = (
    Theme(
        "multi",
        MODULE,
        "bytes",
        MULTI,
        cell=cell | {"config": inside(REFERENCE, store("Saves"))},
        modules=MODULES,
        others=ANY,
    ),
    Theme(
        "failed_inside",
        "tests.wrong_connectors.multi.inside",
        "bytes",
        INSIDE,
        cell={
            "setup": "b16",
            "matrix": "full",
            "config": '{"kv_connector_extra_config": {"kv_lease_duration": 2}}',
        },
        modules=("bytes/multi_connector",),
        runs="cases",
        also=FAILED,
        others="PASS",
        first=False,
    ),
)
