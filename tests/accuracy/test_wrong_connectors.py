"""Each case catches the connector that makes its mistake. The right one passes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_kvconform.apply_declaration import Criteria, apply_declaration
from pytest_kvconform.result import Outcome
from pytest_kvconform.verdict import decide_verdict
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.rings import night

Run = Callable[..., CellRun]
ANSWERED, LOADED = "every_question_is_answered", "each_question_is_loaded"
RIGHT = ("as_many_answers_are_right[strict-match]", "as_many_answers_are_right[flexible-extract]")
EQUAL, BYTES = "answers_equal_those_of_d_alone", "moved_bytes_are_counted"
BLOCKS, ACCEPTED = "all_whole_blocks_are_loaded", "as_many_drafts_are_accepted"
DRAFTS = "kimi_k2_5_eagle3"  # a family with a draft model


def test_a_right_connector_passes(run_cases: Run) -> None:
    run = run_cases("Right")
    assert not run.failed, run.findings
    assert {run.outcomes[name] for name in (ANSWERED, LOADED, EQUAL, BYTES, BLOCKS, *RIGHT)} == {"PASS"}
    loaded = run.evidence[LOADED]
    assert loaded.external_tokens > 0
    assert loaded.bytes_moved > 0


def inside(connector: str, module: str) -> str:
    """The configuration of MultiConnector with this connector and a store in it."""
    child = {"kv_connector": connector, "kv_connector_module_path": module}
    both = [one | {"kv_role": "kv_both"} for one in (child, {"kv_connector": "ExampleConnector"})]
    return json.dumps({"kv_connector_extra_config": {"connectors": both}})


def test_the_front_end_of_multi_connector_ends_over_a_child_that_is_not_registered(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(16)
    run = run_cases("MultiConnector", config=inside("Right", "tests.wrong_connectors.accuracy.servers"))
    assert run.failed == {ANSWERED}, (run.findings, run.reasons)
    assert "Connector 'Right' is not registered" in run.findings[ANSWERED].happened


def test_a_child_that_registers_itself_answers(run_cases: Run, questions: Callable[..., None]) -> None:
    questions(16)
    run = run_cases("MultiConnector", config=inside("ReferenceConnector", "reference_connector"))
    assert not run.failed, run.findings
    assert {run.outcomes[name] for name in (ANSWERED, LOADED, BYTES)} == {"PASS"}


def test_a_d_that_computes_everything_has_no_evidence(run_cases: Run, questions: Callable[..., None]) -> None:
    questions(16)
    run = run_cases("LoadsNothing")
    assert run.failed == {LOADED}, run.reasons
    assert "there is no evidence of a hand-over" in run.findings[LOADED].happened
    assert run.outcomes[EQUAL] == "BLOCKED"  # its answers are those of D alone, and show nothing


@pytest.mark.night
def test_a_d_that_computes_some_prompts_has_no_evidence_for_these(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(16)
    run = run_cases("LoadsMost")
    assert run.failed == {LOADED}, run.reasons
    # one of the two may have the shortest prompt, and a connector may load longer ones alone
    assert re.search(
        "the whole prompt of [12] of 16 requests, although D was asked one question after",
        run.findings[LOADED].happened,
    )


@pytest.mark.parametrize(
    ("declared", "due"), [night({}, "the whole blocks"), ({"min_load": 32}, "what is due")]
)
def test_a_d_that_computes_while_it_loads_others_is_asked_in_turn(
    run_cases: Run, declared: dict[str, int], due: str
) -> None:
    run = run_cases("ComputesWhenBusy", declared=declared)
    assert run.failed == {BLOCKS}, run.findings  # a SHOULD: a warning
    assert re.search(f"less than {due} of [0-9]+ of 128 requests", run.findings[BLOCKS].differs)
    assert run.evidence[LOADED].looked_at == 64
    assert {run.outcomes[name] for name in (ANSWERED, LOADED, EQUAL, BYTES, *RIGHT)} == {"PASS"}


def test_a_d_that_loads_one_block_alone_is_told_how_much_it_lacks(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(16)
    run = run_cases("LoadsOneBlock")
    assert run.failed == {BLOCKS}, run.reasons  # a SHOULD: a warning
    assert "D loaded 32 of the " in run.findings[BLOCKS].happened
    assert "of 16 of 16 requests" in run.findings[BLOCKS].differs


def test_a_d_that_loads_one_block_breaks_what_it_declares(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(16)
    run = run_cases("LoadsOneBlock", declared={"load_granularity": 64})
    assert run.failed == {LOADED}, run.reasons
    assert "load_granularity = 64 is declared, and of 16 of 16 requests" in run.findings[LOADED].happened


@pytest.mark.parametrize("declared", [night({}), {"load_granularity": 512}])
def test_chunks_that_are_longer_than_the_questions_are_asked_with_longer_prompts(
    run_cases: Run, questions: Callable[..., None], declared: dict[str, int]
) -> None:
    questions(16)
    run = run_cases("LoadsChunks", declared=declared)
    assert run.failed <= {BLOCKS}  # a SHOULD, if nothing is declared
    assert {run.outcomes[name] for name in (ANSWERED, LOADED, *RIGHT)} <= {"PASS", "BLOCKED"}
    assert run.outcomes[LOADED] == "PASS"
    assert run.evidence[LOADED].external_tokens == 16 * 512


@pytest.mark.night
def test_a_d_that_loads_longer_prompts_alone_is_told_how_much_it_lacks(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(64)
    run = run_cases("LoadsLongPrompts")
    assert run.outcomes[LOADED] == "PASS"
    assert run.failed == {BLOCKS}, run.reasons  # a SHOULD: a warning
    assert run.evidence[LOADED].external_tokens < 64 * 256  # of some prompts nothing was loaded


@pytest.mark.night
def test_a_d_that_computes_what_its_loads_failed_to_bring_does_not_answer(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(16)
    config = '{"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"num_threads": 0}}'
    run = run_cases("FailsEachLoad", config=config)
    assert run.failed == {ANSWERED}, run.reasons
    assert "questions to the subject were not answered" in run.findings[ANSWERED].happened


@pytest.mark.parametrize(
    ("store", "failed", "loaded"),
    [
        ("WholeBlocks", set(), "PASS"),
        ("Evicts", set(), "BLOCKED"),
        night("KeepsForItself", {LOADED}, "FAIL"),
        ("KeepsNothing", {LOADED}, "FAIL"),
    ],
)
def test_a_store_is_asked_what_p_has_saved(
    run_cases: Run, questions: Callable[..., None], store: str, failed: set[str], loaded: str
) -> None:
    questions(16)
    run = run_cases(store, profile="store", declared={"handover": "none"}, config="")
    assert (run.failed, run.outcomes[LOADED]) == (failed, loaded), run.findings
    if loaded == "BLOCKED":
        assert "the store does not keep the prompts of so many questions" in run.reasons[LOADED]


def test_a_d_with_a_cache_of_its_own_is_no_baseline(run_cases: Run, questions: Callable[..., None]) -> None:
    """It loads when it is asked alone, too. A server without a connector is asked instead."""
    questions(16)
    run = run_cases("tests.right_connectors.designs:OwnCache")
    assert not run.failed, run.findings
    assert {run.outcomes[name] for name in (ANSWERED, LOADED, BYTES, BLOCKS)} == {"PASS"}, run.reasons


@pytest.mark.night
def test_what_d_has_in_a_cache_of_its_own_is_no_hand_over(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(16)
    run = run_cases("LoadsItsOwn")
    assert LOADED in run.failed
    assert "although D was asked one question after" in run.findings[LOADED].happened


@pytest.mark.night
def test_one_wrong_block_in_one_request_of_twenty_changes_answers(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(64, 8)
    run = run_cases("CorruptsOneInTwenty")
    assert EQUAL in run.failed
    assert "of the answers equal those of D alone" in run.findings[EQUAL].happened
    assert LOADED not in run.failed


@pytest.mark.night
def test_one_wrong_block_in_one_request_of_fifty_changes_answers(run_cases: Run) -> None:
    assert EQUAL in run_cases("CorruptsOneInFifty").failed


@pytest.mark.night
def test_one_question_that_is_wrong_each_time_is_named(run_cases: Run) -> None:
    run = run_cases("CorruptsOneQuestion")
    assert run.failed == {EQUAL}, run.reasons
    finding = run.findings[EQUAL]
    assert "the answers to 1 of 64 questions differ from those of D alone again and again" in finding.happened
    assert "8 of 8 times" in finding.happened
    assert "after a right hand-over" in finding.diagnosis


def test_wrong_kv_of_a_draft_model_changes_what_is_accepted(
    case_runner: CaseRunner, questions: Callable[..., None]
) -> None:
    questions(16)
    run = case_runner.run("CorruptsDraft", DRAFTS)
    assert run.failed == {ACCEPTED}, run.reasons  # a SHOULD: a warning
    assert "0 of 48 generated tokens are accepted drafts, and 64 of 96 of D alone" in (
        run.findings[ACCEPTED].happened
    )


@pytest.mark.parametrize(
    ("connector", "outcome"), [night("WholeBlocks", "PASS"), ("KeysOfBlocksAlone", "FAIL")]
)
def test_the_draft_of_a_store_depends_on_the_token_after_a_block(
    case_runner: CaseRunner, tmp_path: Path, connector: str, outcome: str
) -> None:
    config = json.dumps({"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}})
    run = case_runner.run(connector, DRAFTS, profile="store", declared={"handover": "none"}, config=config)
    assert run.outcomes[ACCEPTED] == outcome, run.findings
    assert run.failed <= {ACCEPTED}


def test_wrong_blocks_in_every_request_lose_right_answers(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(16)
    run = run_cases("CorruptsEach")
    assert {EQUAL, *RIGHT} <= run.failed
    assert "0 of 16 answers are right, 16 of D alone" in run.findings[RIGHT[0]].happened
    assert not {ANSWERED, LOADED} & run.failed


def test_a_metric_that_does_not_grow_is_named(run_cases: Run, questions: Callable[..., None]) -> None:
    questions(16)
    run = run_cases("CountsNothing")
    assert run.failed == {BYTES}, run.reasons
    assert "vllm:nixl_bytes_transferred_sum of P and D did not grow" in run.findings[BYTES].happened


def test_a_server_that_dies_is_the_connectors_doing(run_cases: Run, questions: Callable[..., None]) -> None:
    questions(16)
    run = run_cases("DiesInLoad")
    assert run.failed == {ANSWERED}, run.reasons
    finding = run.findings[ANSWERED]
    assert "the tenth load is too much" in finding.happened
    assert "without the connector the same servers answer" in finding.happened
    assert run.outcomes[LOADED] == "BLOCKED"


@pytest.mark.night
def test_a_request_that_is_never_answered_is_the_connectors_doing(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(20)
    run = run_cases("NeverReports", scale=0.3)
    assert run.failed == {ANSWERED}, run.reasons
    assert "questions to the subject were not answered" in run.findings[ANSWERED].happened
    assert "were not asked" in run.findings[ANSWERED].happened


def test_a_server_that_does_not_start_is_the_connectors_doing(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(16)
    run = run_cases("RefusesToStart")
    assert run.failed == {ANSWERED}, run.reasons
    assert "this connector does not like servers" in run.findings[ANSWERED].happened


def test_a_clean_refusal_of_a_family_that_is_declared_unsupported_is_right(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(16)
    results = run_cases("RefusesToStart").results
    assert all(result.refused for result in results if result.outcome in (Outcome.FAIL, Outcome.BLOCKED))
    criteria = Criteria(features={"full-attention": "not yet"})
    verdict = decide_verdict([apply_declaration(one, criteria) for one in results], criteria=criteria)
    assert not {Outcome.FAIL.value, Outcome.BLOCKED.value} & verdict.counts.keys(), verdict.causes


def test_what_a_connector_needs_and_is_not_here_is_no_violation(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(16)
    run = run_cases("NeedsAPackage")
    assert set(run.outcomes.values()) <= {"BLOCKED", "NOT-APPLICABLE"}
    assert "the package a_package_that_is_not_installed is not installed here" in run.reasons[ANSWERED]


@pytest.mark.night
def test_a_failure_that_does_not_come_again_is_no_violation(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(16)
    run = run_cases("DiesOnce")
    assert not run.failed
    assert run.outcomes[ANSWERED] == "BLOCKED"
    assert "once is enough; nothing failed when the same was done once more" in run.reasons[ANSWERED]


@pytest.mark.night
def test_a_server_that_never_comes_up_is_the_connectors_doing(
    run_cases: Run, questions: Callable[..., None]
) -> None:
    questions(16)
    run = run_cases("NeverStarts", scale=0.15)
    assert run.failed == {ANSWERED}, run.reasons
    assert "did not answer within" in run.findings[ANSWERED].happened


def test_a_server_that_is_killed_is_no_violation(run_cases: Run, questions: Callable[..., None]) -> None:
    questions(16)
    run = run_cases("Killed")
    assert not run.failed
    assert run.outcomes[ANSWERED] == "HARNESS"
    assert "was killed by SIGKILL" in run.reasons[ANSWERED]
