"""A connector that hands over, and a store beside it in MultiConnector: each is judged by its profile."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.helpers.case_runner import CellRun
from tests.helpers.wrong import Wrong

SHORT = 0.2  # of deadlines, where one of them has to be waited for
REFERENCE = {"kv_connector": "ReferenceConnector", "kv_connector_module_path": "reference_connector"}
NIXL = {"kv_connector": "NixlConnector"}
EXAMPLE = {"kv_connector": "ExampleConnector"}


def store(name: str) -> dict[str, str]:
    return {"kv_connector": name, "kv_connector_module_path": "tests.multi.wrong_connectors"}


def inside(*children: dict[str, str]) -> str:
    both = [child | {"kv_role": "kv_both"} for child in children]
    return json.dumps({"kv_connector_extra_config": {"connectors": both}})


def wrong_ones(found: CellRun) -> dict[str, str]:
    return {
        name: f"{what}: {found.findings.get(name) or found.reasons.get(name)}"
        for name, what in found.outcomes.items()
        if what not in ("PASS", "NOT-APPLICABLE")
    }


@pytest.mark.parametrize(("profile", "saves"), [("p2p", "Saves"), ("p2p", "SavesLater"), ("store", "Saves")])
def test_both_children_of_a_right_connector_conform(
    run_cases: Callable[..., CellRun], profile: str, saves: str
) -> None:
    found = run_cases("Right", config=inside(REFERENCE, store(saves)), profile=profile)
    assert wrong_ones(found) == {}
    assert found.outcomes["attention_kv_arrives[n55]"] == "PASS"


def test_children_that_vllm_registers_are_known(run_cases: Callable[..., CellRun]) -> None:
    """ExampleConnector gets a folder of the suite, and NixlConnector its threads."""
    for profile in ("p2p", "store"):
        for _ in range(2):  # a load that the machine is too busy for blocks the case
            found = run_cases("MultiConnector", config=inside(NIXL, EXAMPLE), profile=profile)
            if found.outcomes["attention_kv_arrives[n55]"] != "BLOCKED":
                break
        assert found.outcomes["attention_kv_arrives[n55]"] == "PASS", (profile, wrong_ones(found))


NEVER_LOADED = "P had computed and saved the same prompt; 0 tokens came from the store"


@pytest.mark.parametrize(
    ("profile", "wrong"),
    [
        ("p2p", Wrong("GivesTheLoadToTheLast", {"completes[n17]": "D's request is WAITING_FOR_REMOTE_KVS"})),
        ("store", Wrong("LoadsWithTheFirst", {"attention_kv_arrives[n55]": "48 tokens"})),
        ("store", Wrong("SavesToTheFirst", {"d_computes_only_missing_tokens[n55]": NEVER_LOADED})),
    ],
    ids=str,
)
def test_a_mistake_is_caught_by_the_profile_of_the_child(
    run_cases: Callable[..., CellRun], profile: str, wrong: Wrong
) -> None:
    children = inside(REFERENCE, store("Saves"))
    found = run_cases(wrong.connector, config=children, profile=profile, scale=SHORT)
    [(case, says)] = wrong.fails.items()
    assert found.outcomes[case] == "FAIL", wrong_ones(found)
    assert says in found.findings[case].happened, found.findings[case]


def test_a_store_that_is_never_asked_shows_nothing_in_a_hand_over(run_cases: Callable[..., CellRun]) -> None:
    found = run_cases("SavesToTheFirst", config=inside(REFERENCE, store("Saves")), profile="p2p")
    assert wrong_ones(found) == {}
