"""A connector that hands over, and a store beside it in MultiConnector: each is judged by its profile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.case_runner import CellRun
from tests.wrong_connectors.table.multi import REFERENCE, inside, store

NIXL = {"kv_connector": "NixlConnector"}
EXAMPLE = {"kv_connector": "ExampleConnector"}


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


def test_a_store_that_is_never_asked_shows_nothing_in_a_hand_over(run_cases: Callable[..., CellRun]) -> None:
    found = run_cases("SavesToTheFirst", config=inside(REFERENCE, store("Saves")), profile="p2p")
    assert wrong_ones(found) == {}
