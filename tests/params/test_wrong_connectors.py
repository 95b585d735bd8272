"""Mistakes about params, prefix hits, aborts and MultiConnector are found by the cases of their rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_kvconform.plan import load_module
from tests.helpers.case_runner import CellRun
from tests.helpers.wrong import Wrong, on

from . import test_stores
from .checks import ABORTS, HALVES, HITS, MODULES, MULTI, PARAMS, deviations, of

# Theme of a rule -> modules that are run.
OF = {"PARAMS": PARAMS, "HIT": HITS, "ABORT": ABORTS, "MULTI": MULTI, "LOAD": MULTI}
FOR_EVER = "the request waits for ever: its load was announced, and none is ordered"
WRONG = [
    # Params.
    Wrong(
        "HandsStrangersOver",
        on(
            r"requests_without_own_params_are_ignored\[p-\w+\]",
            r"the connector returned \(True, \{'do_remote_prefill': True",
        ),
        rules="KV-PARAMS-001",
    ),
    Wrong(
        "LoadsByTransferId",
        on(
            r"requests_without_own_params_are_ignored\[[pd]-of_another\]",
            r"for a request with the params \{'transfer_id': .* the connector returned \(16, True\)",
        ),
        rules="KV-PARAMS-001",
    ),
    Wrong(
        "TrustsAddresses",
        on(
            r"corrupted_params_fail_only_their_request\[missing\]",
            rf"^with remote_host, remote_port missing: {FOR_EVER}$",
        ),
        rules="KV-PARAMS-002",
    ),
    Wrong(
        "TrustsGroups",
        on(
            r"corrupted_lists_fail_only_their_request\[emptied\]",
            r"a load of nothing: the metadata names no block to load from",
        ),
        rules="KV-PARAMS-002",
    ),
    Wrong(
        "TrustsGroups",
        on(
            r"corrupted_lists_fail_only_their_request\[emptied\]",
            r"^with remote_block_ids emptied: the request waits for a load of nothing",
        ),
        rules="KV-PARAMS-002",
        family="qwen3_5_35b_a3b",
        topology="P2D2",
    ),
    Wrong(
        "TrustsNames",
        {
            r"corrupted_params_fail_only_their_request\[(list|object)\]": (
                "^with remote_engine_id (list|object): on_new_request raised TypeError: unhashable "
                r"type: '(list|dict)' \(base_scheduler"
            )
        },
        rules="KV-PARAMS-002",
    ),
    Wrong(
        "RemembersTheUnusable",
        on(
            r"corrupted_params_fail_only_their_request\[\w+\]|"
            r"corrupted_lists_fail_only_their_request\[(?!longer|negative|huge)\w+\]",
            r"the connector of D\d+ remembers ever more requests that have ended, \d+ of \d+ by now: "
            r"connector_scheduler\.refused\.item",
        ),
        rules="KV-PARAMS-002",
        night=True,
    ),
    Wrong(
        "RemembersLoads",
        on(
            r"corrupted_params_fail_only_their_request\[\w+\]|"
            r"corrupted_lists_fail_only_their_request\[(longer|negative|huge)\w*\]",
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
        {r"params_are_read_by_key\[(reordered|with_more)\]": r"D announces 0 tokens and orders another load"},
        rules="KV-PARAMS-004",
    ),
    Wrong(
        "MovesBlocks",
        {r"params_are_read_by_key\[with_more\]": r"D announces \d+ tokens and orders another load"},
        rules="KV-PARAMS-004",
    ),
    Wrong(
        "OrdersOnce",
        {
            r"params_are_read_by_key\[twice\]": (
                r"of two requests with the same params the second one is WAITING_FOR_REMOTE_KVS, and no step"
            )
        },
        rules="KV-PARAMS-004",
    ),
    Wrong(
        "TakesTurns",
        on(
            r"p_survives_params_of_an_earlier_turn|p_survives_corrupted_params\[(?!missing|null|empty)\w+\]",
            rf"update_state_after_alloc raised AssertionError|{FOR_EVER}",
        ),
        rules="KV-PARAMS-005",
    ),
    # Hits.
    Wrong(
        "ForgetsTheBackoff",
        on(
            r"load_starts_after_the_local_hit\[(?!2b\+1_2b|b\+1_b)[\w+]+\]",
            r"without a hit D loads the tokens up to \d+ of \d+; with \d+ of them in its own cache",
        ),
        rules="KV-HIT-002",
        family="qwen3_5_35b_a3b",
        topology="P2D2",
    ),
    Wrong(
        "LeavesStatesOut",
        on(
            r"load_includes_every_state\[(hit|diverged|one_token_left)\]",
            r"after 2112 were announced, and the metadata names no slot of group 0 \(MambaSpec\)",
        ),
        rules="KV-HIT-003",
        family="qwen3_5_35b_a3b",
        topology="P2D2",
    ),
    Wrong(
        "LoadsTheLastToken",
        on(
            r"load_ends_where_p_stopped\[(?!1\])[\w+-]+\]",
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
                r"abort_leaves_other_requests_alone\[(loaded|failed|running|preempted)\]",
                r"was aborted while \w+: request_finished_all_groups returned \(True, None\)$",
            ),
            rules="KV-ABORT-001",
        )
        for connector in ("KeepsWhatLoads", "KeepsWhatLoadsBesideATensor")
    ),
    Wrong(
        "ForgetsTheOthers",
        {r"abort_leaves_other_requests_alone\[\w+\]": r"which loaded 0 tokens, computed 53$"},
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
        {r"loads_nothing_if_another_connector_loads\[first\]": r"orders a load into blocks \["},
        rules="KV-MULTI-001",
    ),
    Wrong(
        "ActsWhenAsked",
        {r"loads_the_same_as_alone\[unsure_last\]": r"beside a fake connector \(unsure_last\) 0"},
        rules="KV-MULTI-001",
    ),
    Wrong(
        "KeepsStrangers",
        {r"keeps_only_its_own_blocks\[fake-\w+\]": r"returned \(True, None\)"},
        rules="KV-MULTI-002",
    ),
    Wrong(
        "KnowsEveryReport",
        {r"keeps_only_its_own_blocks\[fake-\w+\]": r"nobody has kept"},
        rules="KV-LOAD-003",
    ),
    Wrong(
        "ReusesTheDict",
        {r"shares_the_params_dict\[last\]": r"params of request 1 have \['fake-0', 'fake-1'"},
        rules="KV-MULTI-003",
    ),
    Wrong(
        "IsTheOnlyOne",
        {r"handshake_metadata_reaches_scheduler_half\[\w+\]": r"and through MultiConnector nothing$"},
        rules="KV-MULTI-004",
    ),
]
# Both halves beside another connector. What is wrong there shows in other cases of these modules, too.
BESIDE = [
    Wrong(
        "GivesUpWhatOthersLoad",
        {
            r"loads_of_another_connector_are_not_reported\[(loaded|failed)-first\]": r"the fake connector "
            r"reported its load as (loaded, and \S+ ended with 'error'|failed, and .* reported \S+, too)$"
        },
        rules="KV-MULTI-007",
    ),
    Wrong(
        "ListsFailedBlocks",
        {
            r"loads_of_another_connector_are_not_reported\[.*\]": r"^get_block_ids_with_load_errors\(\) is "
            r"\[\], a list, which MultiConnector cannot unite"
        },
        rules="KV-MULTI-007",
    ),
    Wrong(
        "ClosesTheGroup",
        {
            r"shutdown_ends_both_connectors\[\w+-\w+\]": r"shutdown\(\) of the worker half raised "
            r"AttributeError: 'MultiConnector' object has no attribute"
        },
        rules="KV-MULTI-008",
    ),
    Wrong(
        "EndsTheProcess",
        {
            r"shutdown_ends_both_connectors\[.*\]": r"(behind .* raised SystemExit: 0|before .* raised "
            r"SystemExit: 0, and shutdown\(\) of the other connector was not called)$"
        },
        rules="KV-MULTI-008",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_mistake_is_found_by_the_cases_of_its_rule(run_cases: Callable[..., CellRun], wrong: Wrong) -> None:
    run = run_cases(wrong.connector, **wrong.cell, only=of(OF[wrong.rules.split("-")[1]]))
    assert deviations(run, wrong) == []


@pytest.mark.parametrize("wrong", BESIDE, ids=str)
def test_a_mistake_beside_another_connector_is_found(run_cases: Callable[..., CellRun], wrong: Wrong) -> None:
    name = min(wrong.fails).partition("\\[")[0]
    run = run_cases(wrong.connector, **wrong.cell, only=lambda planned: planned.case.name == name)
    assert deviations(run, wrong) == []


@pytest.mark.parametrize("connector", ["Right", "SureLater"])
def test_both_halves_of_a_right_connector_pass_beside_another_one(
    run_cases: Callable[..., CellRun], connector: str
) -> None:
    run = run_cases(connector, "llama3_1_8b", only=of(HALVES))
    assert set(run.outcomes.values()) == {"PASS"}, run.findings
    assert len(run.outcomes) == 10


def test_silence_beside_another_connector_is_a_warning(run_cases: Callable[..., CellRun]) -> None:
    silent = Wrong(
        "SilentWithoutALoad",
        on(
            r"loads_nothing_if_another_connector_loads\[first\]",
            r"no step's metadata orders a notification to P",
        ),
        rules="KV-HIT-001",
    )
    assert deviations(run_cases(silent.connector, **silent.cell, only=of(MULTI)), silent) == []


def test_every_rule_of_these_cases_has_a_mistake() -> None:
    rules = {case.rule for module in MODULES for case in load_module(module)[1]}
    assert rules <= {wrong.rules for wrong in (*WRONG, *BESIDE, *test_stores.WRONG)}


# ---- right ones ----------------------------------------------------------------------------------


@pytest.mark.parametrize("connector", ["Right", "SureLater"])
@pytest.mark.parametrize(
    ("geometry", "topology"), [("llama3_1_8b", "P1D1"), ("gemma3_1b", "P1D1"), ("qwen3_5_35b_a3b", "P2D2")]
)
def test_a_right_connector_passes(
    run_cases: Callable[..., CellRun], geometry: str, topology: str, connector: str
) -> None:
    run = run_cases(connector, geometry, topology, only=of(MODULES[:4]))
    passed = {name for name, outcome in run.outcomes.items() if outcome == "PASS"}
    assert set(run.outcomes) == passed, run.findings
    assert len(passed) > 30
    assert (run.verdict.word, run.verdict.exit_code) == ("CONFORMS", 0)


def test_a_load_may_be_ordered_in_parts(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("OrdersStatesLater", "qwen3_5_35b_a3b", "P2D2", only=of(HITS))
    assert set(run.outcomes.values()) == {"PASS"}, run.findings


def test_a_request_may_wait_for_the_load_of_another_one(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("LetsItsTwinGo", "llama3_1_8b", "P1D1", only=of(ABORTS))
    assert set(run.outcomes.values()) == {"PASS"}, run.findings


# ---- vLLM's own: docs/findings.md ----------------------------------------------------------------


def test_vllms_nixl_connector_trusts_params(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("NixlConnector", "llama3_1_8b", only=of(PARAMS))
    said = {name: finding.happened for name, finding in run.findings.items()}
    assert said["corrupted_params_fail_only_their_request[missing]"] == (
        f"with remote_engine_id, remote_request_id, remote_host, remote_port missing: {FOR_EVER}"
    )
    assert said["corrupted_params_fail_only_their_request[list]"].startswith(
        "with remote_engine_id list: on_new_request raised TypeError: unhashable type: 'list'"
    )
    asserts = "update_state_after_alloc raised AssertionError (pull_scheduler.py:186)"
    assert (
        said["corrupted_lists_fail_only_their_request[missing]"]
        == f"with remote_block_ids missing: {asserts}"
    )
    assert said["corrupted_lists_fail_only_their_request[emptied]"].endswith(
        "the metadata names no block to load from"
    )
    assert said["p_survives_corrupted_params[flag]"] == f"with do_remote_prefill flag: {asserts}"
    assert said["p_survives_params_of_an_earlier_turn"] == f"with params of an earlier turn: {FOR_EVER}"
    assert {finding.rule for finding in run.findings.values()} == {"KV-PARAMS-002", "KV-PARAMS-005"}


def test_vllms_nixl_connector_is_right_about_the_rest(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("NixlConnector", "qwen3_5_35b_a3b", "P2D2", only=of((*HITS, *ABORTS, *MULTI)))
    assert set(run.outcomes.values()) == {"PASS"}, run.findings
