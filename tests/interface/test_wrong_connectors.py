"""Every planted mistake is found by the case that is about it, and by no other, and named in one sentence; right connectors pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pytest_kvconform.plan import load_module, module_names
from tests.engine.judged import Judged

QUICK, FULL = "quick", "full"


@dataclass(frozen=True)
class Wrong:
    """One mistake, and all that the suite says about it: which cases fail, and what they say happened; every other one passes."""

    connector: str
    says: dict[str, str]  # case, with its variant if not all fail -> pattern of what happened, searched for
    geometry: str = "llama3_1_8b"
    topology: str = "P1D1"
    matrix: str = QUICK

    def __str__(self) -> str:
        return f"{self.connector}-{self.geometry}-{self.topology}"


NO_RANK = r"on_new_request raised AssertionError: tensor model parallel group is not initialized"
NO_LAYERS = r"__init__ raised AttributeError: '\w+Spec' object has no attribute 'kv_cache_specs' \(wrong_connectors\.py:\d+\)"

WRONG = [
    # The class.
    Wrong(
        "CopiesTheConfiguration",
        {
            "base_keeps_what_it_was_given": r"the base class of the (scheduler|worker) half has .* as _vllm_config"
        },
    ),
    Wrong(
        "TakesNoKeywords",
        {
            "hooks_take_what_vllm_passes": r"has start_load_kv\(self, forward_context\): got an unexpected keyword argument"
        },
    ),
    Wrong(
        "WaitsInACoroutine",
        {"hooks_take_what_vllm_passes": r"WaitsInACoroutine\.on_new_request is a coroutine"},
    ),
    Wrong(
        "ForgetsToInherit",
        {
            "allocator_is_what_the_class_says": r"does not inherit SupportsHMA, so vLLM turned the hybrid memory allocator off"
        },
        geometry="gemma3_1b",
    ),
    # What it says of itself.
    Wrong(
        "AnswersNothing",
        {"graphs_are_a_yes_or_no": r"requires_piecewise_for_cudagraph\(\{\}\) returned None"},
    ),
    Wrong(
        "PromisesByMethod",
        {"promises_are_bools": r"requires_kv_delivery of the \w+ half is a method and no property"},
    ),
    Wrong(
        "LoadsTheFirstGroup",
        {
            "loaded_groups_are_those_of_the_load": r"names \[0\] of the groups \[0, 1, 2, 3, 4, 5, 6\]: vLLM zeroes new blocks of the others"
        },
        geometry="gemma3_1b",
    ),
    Wrong(
        "NamesAGroupTwice",
        {
            "loaded_groups_are_those_of_the_load": r"returned \(0, 0\), and vLLM expects group numbers, each once"
        },
    ),
    Wrong(
        "CountsSourcesTwice",
        {"optional_hooks_answer": r"get_external_cache_hit_sources\(request, 1\) returned"},
    ),
    Wrong(
        "PushesForEver", {"optional_hooks_answer": r"has_pending_push_work\(\) is True with no request left"}
    ),
    Wrong(
        "GivesNoEvents",
        {"optional_hooks_answer": r"take_events\(\) returned None, and vLLM makes a list of it"},
    ),
    Wrong("AsksForNoLayout", {"layout_asked_for_is_one": r"returned 'BHND'; vLLM knows LBHNC, LBNHC"}),
    Wrong(
        "FlattensMemory",
        {
            "registers_in_the_layout_that_was_resolved[LBNHC]": r"register_kv_caches raised RuntimeError: view size is not"
        },
    ),
    # The start.
    Wrong(
        "SharesTheProcess",
        {
            "worker_half_starts_alone": r"get_handshake_metadata raised RuntimeError: there is no scheduler half"
        },
    ),
    Wrong(
        "PlaysBothRoles",
        {"scheduler_half_starts_alone": r"the scheduler half built a worker half in its own process"},
    ),
    Wrong(
        "AsksForItsRank",
        dict.fromkeys(
            ("scheduler_half_starts_alone", "loaded_groups_are_those_of_the_load", "optional_hooks_answer"),
            NO_RANK,
        ),
    ),
    Wrong(
        "ReadsLayersOfGroups",
        dict.fromkeys(
            ("starts_in_vllms_order", "scheduler_half_starts_alone", "loaded_groups_are_those_of_the_load"),
            NO_LAYERS,
        ),
        geometry="kimi_k2_5_eagle3",
        topology="P2D2",
        matrix=FULL,
    ),
    Wrong("CountsInWords", {"starts_in_vllms_order": r"get_finished_count\(\) returned 'all'"}),
    Wrong(
        "SpeaksUnasked",
        {
            "starts_in_vllms_order": r"without any request the worker half reports finished_recving = \{'cmpl-of-another-engine'\}"
        },
    ),
    Wrong(
        "HasItsOwnId",
        {
            "both_halves_have_vllms_engine_id": r"vLLM gave the engine the engine_id \S+, and the worker half's object"
        },
    ),
    Wrong(
        "NeedsRankZero",
        {
            "metadata_of_some_ranks[no_rank]": r"set_xfer_handshake_metadata_pp_aware raised KeyError: \(0, 0\)"
        },
    ),
    Wrong(
        "Upstream",
        {
            "taken_port_is_no_reason_to_wait": r"another one with the same port still waits in set_xfer_handshake_metadata after 2 s"
        },
    ),
    Wrong(
        "PublishesALock",
        {
            "published_metadata_travel": r"a NixlHandshakePayload of get_handshake_metadata does not survive pickle"
        },
    ),
    Wrong(
        "LooksEveryNameUp",
        {
            "every_layer_is_registered": r"register_kv_caches raised KeyError: 'model\.layers\.35\.self_attn\.attn'"
        },
    ),
    Wrong(
        "HandsOverEveryGroup",
        {
            "other_groups_stay_out": r"group 6 is not transferred .*, and its blocks \[\d+.*\] are among what P hands over"
        },
        geometry="gemma3_1b",
    ),
    # The end.
    Wrong(
        "LeavesAThread",
        {"leaves_nothing": r"after shutdown of both halves there are still 1 threads \(poller\)"},
    ),
    Wrong(
        "EndsOnce",
        {"twice_is_once": r"shutdown raised AttributeError: 'EndsOnce' object has no attribute 'running'"},
    ),
    Wrong(
        "EndsWhatItRegistered",
        {"twice_is_once[half_built]": r"shutdown raised AttributeError: .* no attribute 'registered'"},
    ),
    Wrong("KeepsAFile", {"another_one_can_follow": r"has 2 more open files than after the first one's"}),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_mistake_is_found_by_its_case_alone_and_named_in_one_sentence(
    judge: Callable[..., Judged], wrong: Wrong
) -> None:
    judged = judge(wrong.connector, wrong.geometry, wrong.topology, matrix=wrong.matrix)
    found = {name: finding.happened for name, finding in judged.findings.items()}
    of = {name: name if name in wrong.says else name.partition("[")[0] for name in judged.outcomes}
    assert {of[name] for name in found} == wrong.says.keys()
    assert {name for name in judged.outcomes if of[name] in wrong.says} == found.keys(), (
        "every variant of a case that is named fails"
    )
    assert {judged.outcomes[name] for name in judged.outcomes.keys() - found} <= {"PASS", "NOT-APPLICABLE"}
    assert (judged.verdict.word, judged.verdict.exit_code) == ("VIOLATES", 1)
    for name, happened in found.items():
        assert re.search(wrong.says[of[name]], happened), happened
        assert "\n" not in happened and len(happened) < 500


def test_every_case_has_a_mistake_that_only_it_finds() -> None:
    cases = {
        case.name for name in module_names() if name.startswith("interface/") for case in load_module(name)[1]
    }
    assert cases - {min(wrong.says).partition("[")[0] for wrong in WRONG if len(wrong.says) == 1} == set()


RIGHT = [
    ("Right", "llama3_1_8b", "P1D1", QUICK),
    ("Right", "llama3_1_8b", "P1D2", FULL),
    ("Right", "gemma3_1b", "P1D1", QUICK),
    ("Right", "qwen3_5_35b_a3b", "P2D2", QUICK),
    ("Right", "kimi_k2_5_eagle3", "P2D2", FULL),
]


@pytest.mark.parametrize(
    ("connector", "geometry", "topology", "matrix"), RIGHT, ids=["-".join(row[:3]) for row in RIGHT]
)
def test_a_right_connector_passes_every_case(
    judge: Callable[..., Judged], connector: str, geometry: str, topology: str, matrix: str
) -> None:
    judged = judge(connector, geometry, topology, matrix=matrix)
    assert judged.outcomes and set(judged.outcomes.values()) == {"PASS"}


@pytest.mark.parametrize("geometry", ["llama3_1_8b", "gemma3_1b"])
def test_a_connector_that_transfers_nothing_breaks_no_rule(
    judge: Callable[..., Judged], geometry: str
) -> None:
    judged = judge("Nothing", geometry)
    passed = {name.partition("[")[0] for name, outcome in judged.outcomes.items() if outcome == "PASS"}
    assert set(judged.outcomes.values()) <= {"PASS", "NOT-APPLICABLE"}
    assert {"scheduler_half_starts_alone", "starts_in_vllms_order", "every_layer_is_registered"} <= passed
