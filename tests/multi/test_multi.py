"""A connector that hands over, and a store beside it in MultiConnector: each is judged by its profile."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.helpers.case_runner import CellRun

SHORT = 0.2  # of deadlines, where one of them has to be waited for
REFERENCE = {"kv_connector": "ReferenceConnector", "kv_connector_module_path": "reference_connector"}
NIXL = {"kv_connector": "NixlConnector"}
EXAMPLE = {"kv_connector": "ExampleConnector"}


def store(name: str) -> dict[str, str]:
    return {"kv_connector": name, "kv_connector_module_path": "tests.multi.wrong_connectors"}


def inside(*children: dict[str, str]) -> str:
    both = [child | {"kv_role": "kv_both"} for child in children]
    return json.dumps({"kv_connector_extra_config": {"connectors": both}})


def wrong(found: CellRun) -> dict[str, str]:
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
    assert wrong(found) == {}
    assert found.outcomes["attention_kv_arrives[n55]"] == "PASS"


def test_children_that_vllm_registers_are_known(run_cases: Callable[..., CellRun]) -> None:
    """ExampleConnector gets a folder of the suite, and NixlConnector its threads."""
    for profile in ("p2p", "store"):
        found = run_cases("MultiConnector", config=inside(NIXL, EXAMPLE), profile=profile)
        assert found.outcomes["attention_kv_arrives[n55]"] == "PASS", (profile, wrong(found))


@pytest.mark.parametrize(
    ("connector", "saves", "profile", "case", "says"),
    [
        (
            "GivesTheLoadToTheLast",
            "Saves",
            "p2p",
            "completes[n17]",
            "D's request is WAITING_FOR_REMOTE_KVS",
        ),
        (
            "LoadsWithTheFirst",
            "Saves",
            "store",
            "attention_kv_arrives[n55]",
            "48 tokens",
        ),
        (
            "SavesToTheFirst",
            "Saves",
            "store",
            "d_computes_only_missing_tokens[n55]",
            "P had computed and saved the same prompt; 0 tokens came from the store",
        ),
    ],
)
def test_a_mistake_is_caught_by_the_profile_of_the_child(
    run_cases: Callable[..., CellRun], connector: str, saves: str, profile: str, case: str, says: str
) -> None:
    found = run_cases(connector, config=inside(REFERENCE, store(saves)), profile=profile, scale=SHORT)
    assert found.outcomes[case] == "FAIL", wrong(found)
    assert says in found.findings[case].happened, found.findings[case]


def test_a_store_that_is_never_asked_shows_nothing_in_a_hand_over(run_cases: Callable[..., CellRun]) -> None:
    found = run_cases("SavesToTheFirst", config=inside(REFERENCE, store("Saves")), profile="p2p")
    assert wrong(found) == {}
