"""Cases about the next turn of a conversation: right connectors pass, and a case finds each mistake."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.rings import night

TURNS = "bytes/turns/next_turn"
RIGHT = ("KeepsForTheNextTurn", "CopiesForTheNextTurn")
KEYS = {"lease": "kv_lease_duration", "turn_lease": "turn_s"}
FREED, READ, LATE = (
    "all_blocks_are_freed",
    "blocks_stay_until_p_has_read_them",
    "read_after_the_lease_is_detected",
)
ENDS, COMPUTES, LOADS = "both_turns_end", "p_computes_only_missing_tokens", "p_loads_what_d_has"
SHORTER = "shorter_prompt_is_noticed"
LEASE_FREED = "d_frees_what_nobody_reads[no_turn]"


def declared(**features: Any) -> dict[str, str]:
    return {"features": json.dumps({"bidirectional": True} | features), **KEYS}


def run_turns(run_cases: Callable[..., CellRun], connector: str, variants: str = "", **more: Any) -> CellRun:
    def about_turns(planned: Any) -> bool:
        return planned.module == TURNS or planned.case.name == FREED

    more.setdefault("declared", declared())
    return run_cases(connector, variants=variants, only=more.pop("only", about_turns), scale=0.2, **more)


@pytest.mark.parametrize("connector", [RIGHT[0], night(RIGHT[1]), "NixlConnector"])
def test_right_connectors_pass(run_cases: Callable[..., CellRun], connector: str) -> None:
    """But for two faults of NixlConnector: P announces a load again, and pairs the last blocks."""
    more: dict[str, Any] = {}
    if connector == "NixlConnector":
        more = {"config": '{"kv_connector_extra_config": {"bidirectional_kv_xfer": true}}', "declared": {}}
    run = run_turns(run_cases, connector, **more)
    faults = {f"{ENDS}[preempted]", f"{ENDS}[late-recompute]", f"{SHORTER}[shorter]"}
    wrong = {name: run.findings.get(name) for name in run.failed}
    assert run.failed == (faults if more else set()), wrong
    passed = {name for name, outcome in run.outcomes.items() if outcome == "PASS"}
    assert {f"{LOADS}[next_turn]", f"{LOADS}[same_p]", f"{COMPUTES}[same_p]"} <= passed
    assert {f"{READ}[overwritten]", f"{LATE}[late-fail]", f"{ENDS}[aborted_on_p]", f"{FREED}[n17]"} <= passed
    if connector != "CopiesForTheNextTurn":  # which keeps no blocks
        assert LEASE_FREED in passed
    moved = run.evidence[f"{LOADS}[next_turn]"]
    assert moved.bytes_moved > 0
    assert moved.external_tokens == run.evidence[f"{COMPUTES}[next_turn]"].external_tokens


def test_undeclared_blocks_for_a_later_request_are_named_as_such(run_cases: Callable[..., CellRun]) -> None:
    """The blocks are kept by design, and no feature says so: the diagnosis names the feature to declare."""
    features = json.dumps({"bidirectional": {"unsupported": "not declared"}})
    run = run_turns(
        run_cases,
        "KeepsForTheNextTurn",
        "n17",
        declared={"features": features, **KEYS},
        only=lambda planned: planned.case.name == FREED,
    )
    [finding] = run.findings.values()
    assert finding.rule == "KV-BLOCKS-001"
    assert "D keeps them for a later request" in finding.diagnosis
    assert "Declare the feature bidirectional" in finding.diagnosis


def test_without_a_key_for_the_lease_nobody_can_wait_for_its_end(run_cases: Callable[..., CellRun]) -> None:
    run = run_turns(
        run_cases,
        "KeepsForTheNextTurn",
        "n17 no_turn",
        declared=declared() | {"turn_lease": ""},
    )
    assert run.outcomes[f"{FREED}[n17]"] == run.outcomes[LEASE_FREED] == "BLOCKED"
    assert "`turn_lease`, the key" in run.reasons[LEASE_FREED]


@pytest.mark.parametrize("features", [{}, {"bidirectional": True}], ids=["undeclared", "declared"])
def test_p_is_judged_where_d_may_keep_blocks(run_cases: Callable[..., CellRun], features: Any) -> None:
    """Nobody knows for how long D may keep its blocks, and P never frees its own."""
    declared = {"features": json.dumps(features), "turn_lease": ""}
    right = run_turns(
        run_cases,
        "KeepsForTheNextTurn",
        "n17",
        declared=declared,
        only=lambda planned: planned.case.name == FREED,
    )
    assert right.outcomes == {f"{FREED}[n17]": "BLOCKED"}
    wrong = run_turns(
        run_cases, "NeverFreesOnP", "n17", declared=declared, only=lambda planned: planned.case.name == FREED
    )
    assert wrong.outcomes == {f"{FREED}[n17]": "FAIL"}
    assert "D has not notified P" in wrong.findings[f"{FREED}[n17]"].diagnosis


@pytest.mark.parametrize(
    ("connector", "declared", "outcome"),
    [
        ("KeepsForTheNextTurn", {"features": "{}", "turn_lease": ""}, "BLOCKED"),
        ("KeepsForTheNextTurn", declared(), "PASS"),
        ("NeverFrees", declared(), "FAIL"),
        ("NeverFreesOnP", {"features": "{}", "turn_lease": ""}, "FAIL"),
    ],
)
def test_live_engines_are_judged_alike(
    case_runner: CaseRunner, connector: str, declared: dict[str, str], outcome: str
) -> None:
    """The protocol tier brings requests of P and of D to their ends, and waits until no blocks are kept."""
    runner = copy.copy(case_runner)
    runner.tier = "protocol"
    run = runner.run(
        connector,
        "llama3_1_8b",
        setup="b16",
        scale=0.2,
        declared=declared,
        only=lambda planned: planned.case.name == "memory_of_both_halves_is_bounded",
    )
    assert set(run.outcomes.values()) == {outcome}, run.results


@pytest.mark.parametrize("connector", ["ReferenceConnector", "tests.right_connectors.bookkeeping:OwnKeys"])
def test_what_keeps_nothing_for_a_next_turn_is_not_applicable(
    run_cases: Callable[..., CellRun], connector: str
) -> None:
    if ":" not in connector:
        connector = f"reference_connector:{connector}"
    features = json.dumps({"bidirectional": {"unsupported": "D returns nothing"}})
    run = run_turns(
        run_cases, connector, declared={"features": features}, only=lambda planned: planned.module == TURNS
    )
    assert set(run.outcomes.values()) == {"NOT-APPLICABLE"}, run.findings
