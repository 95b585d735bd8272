"""A feature that is declared unsupported, in the tiers without transfers: clean refusals of each hook."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest

from pytest_kvconform import features
from pytest_kvconform.apply_declaration import (
    REFUSED_THOUGH_SUPPORTED,
    WRONG_THOUGH_UNSUPPORTED,
    Criteria,
    apply_declaration,
)
from pytest_kvconform.result import Outcome
from pytest_kvconform.verdict import decide_verdict
from tests.helpers.case_runner import CaseRunner, CellRun

ALL = dict.fromkeys(features.load(), "")
WINDOW, HIT = "sliding-window", "prefix-hit"


@dataclass(frozen=True)
class Declines:
    """One way to decline a feature, the case that shows it, and the connector's message."""

    connector: str
    module: str  # whose cases are run
    by: str
    declined: str  # "": not cleanly
    feature: str = WINDOW
    geometry: str = "gemma3_1b"

    def __str__(self) -> str:
        return self.connector


START, LATER = "interface/startup", "protocol/kv_transfer_params"
CLEAN = [
    Declines(
        "DeclinesMemory",
        START,
        "engine_starts_in_vllm_call_order[D]",
        "NotImplementedError: sliding windows are not supported",
    ),
    Declines(
        "DeclinesIntroduction",
        START,
        "engine_starts_in_vllm_call_order[D]",
        "ValueError: this engine has sliding windows, and they are not supported",
    ),
]
SILENT = [  # no case fails: there is nothing to look at
    Declines("AnnouncesNothing", LATER, "params_are_read_by_key[reordered]", ""),
    Declines("HandsNothingOver", LATER, "params_are_read_by_key[reordered]", ""),
]
WRONG = [
    Declines("Stumbles", START, "engine_starts_in_vllm_call_order[D]", ""),
    Declines("SaysNoWord", START, "engine_starts_in_vllm_call_order[D]", ""),
    Declines("DeclinesTooLate", LATER, "params_are_read_by_key[reordered]", ""),
    Declines(
        "LoadsTooMuchBehindHits",
        "protocol/prefix_cache_hits",
        "load_starts_after_the_local_hit[3b_b]",
        "",
        HIT,
        "llama3_1_8b",
    ),
]


def run_module(case_runner: CaseRunner, one: Declines) -> CellRun:
    """What the cases of its module say."""
    mine = copy.copy(case_runner)
    mine.module, mine.tier = "tests.wrong_connectors.params.declining", one.module.partition("/")[0]
    return mine.run(
        one.connector, one.geometry, setup="b16", only=lambda planned: planned.module == one.module
    )


@pytest.mark.parametrize("one", [*CLEAN, *SILENT, *WRONG], ids=str)
def test_a_declined_feature_is_not_applicable_or_a_violation(case_runner: CaseRunner, one: Declines) -> None:
    found = run_module(case_runner, one)
    assert "HARNESS" not in found.outcomes.values(), [result.reason for result in found.results]
    declared = Criteria(features=ALL | {one.feature: "not yet"})
    applied = {
        name: apply_declaration(result, declared)
        for name, result in zip(found.outcomes, found.results, strict=True)
    }
    [row] = [
        row
        for row in decide_verdict(list(applied.values()), None, (), declared).features
        if row.name == one.feature
    ]
    [promised] = [
        row
        for row in decide_verdict(found.results, None, (), Criteria(features=ALL)).features
        if row.name == one.feature
    ]
    if one in WRONG:
        assert (applied[one.by].outcome, applied[one.by].declaration_rule) == (
            Outcome.FAIL,
            WRONG_THOUGH_UNSUPPORTED,
        )
        assert (row.observed, row.rule, promised.rule) == ("fails", WRONG_THOUGH_UNSUPPORTED, "")
        return
    assert {result.outcome for result in applied.values() if one.feature in result.features} == {
        Outcome.NOT_APPLICABLE
    }
    assert (row.observed, row.rule, promised.observed, promised.rule) == (
        "refused",
        "",
        "refused",
        REFUSED_THOUGH_SUPPORTED,
    )
    assert applied[one.by].refused
    if one in CLEAN:
        assert found.findings[one.by].declined == one.declined
        assert found.outcomes[one.by] == "FAIL"  # where it is declared as supported, or not at all
    else:
        assert found.failed == set()


@pytest.mark.parametrize("connector", ["DeclinesMemory", "DeclinesIntroduction"])
def test_where_there_is_nothing_to_decline_everything_passes(case_runner: CaseRunner, connector: str) -> None:
    found = run_module(case_runner, Declines(connector, START, "", "", geometry="llama3_1_8b"))
    # as NixlConnector itself: docs/findings.md
    assert found.failed == {"start_on_taken_port_does_not_hang"}, found.findings
    # every worker of NixlConnector publishes handshake metadata
    assert {name: outcome for name, outcome in found.outcomes.items() if outcome not in ("PASS", "FAIL")} == {
        "set_xfer_handshake_metadata_takes_any_ranks[no_rank]": "NOT-APPLICABLE"
    }
