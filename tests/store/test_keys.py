"""The keys of stores: what is saved under one key is announced under no other, and a reset forgets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_kvconform.apply_declaration import Criteria, feature_results
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed
from tests.helpers.wrong import on

OTHER_KEYS, RESET = "other_keys_match_nothing", "reset_store_forgets"
MODEL, DTYPE = "other_models_match_nothing[model]", "other_models_match_nothing[dtype]"


@pytest.fixture(scope="module")
def case_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.wrong_connectors.store.keys", "protocol", ("llama3_1_8b",))
        yield runner
        assert runner.close() == []


@pytest.fixture
def run_cases(case_runner: CaseRunner, tmp_path: Path) -> Callable[[str], CellRun]:
    """Run the cases about keys on a store."""

    def run(store: str, module: str = "protocol/stores/keys", case: str = "") -> CellRun:
        return case_runner.run(
            store,
            "llama3_1_8b",
            setup="b16",
            profile="" if store == "ExampleConnector" else "store",
            config=json.dumps({"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}),
            only=lambda planned: planned.module == module and planned.case.name.startswith(case),
        )

    return run


@pytest.mark.parametrize(("store", "resets"), [("Right", True), ("Refuses", False), ("Hashes", True)])
def test_a_right_store_passes(run_cases: Callable[[str], CellRun], store: str, resets: bool) -> None:
    run = run_cases(store)
    assert {name for name, outcome in run.outcomes.items() if outcome != "PASS"} == set(
        () if resets else (RESET,)
    )
    assert run.outcomes[RESET] == ("PASS" if resets else "NOT-APPLICABLE")
    announced = [evidence.external_tokens for evidence in run.evidence.values()]
    assert len(announced) >= 6 and min(announced) >= 48


def test_a_folder_that_persists_has_no_prompt_of_another_case_or_run(
    run_cases: Callable[..., CellRun],
) -> None:
    for module in ("protocol/stores/keys", "protocol/stores/saved_prompts"):
        first, second = run_cases("Right", module), run_cases("Right", module)
        assert first.outcomes == second.outcomes, second.findings
        assert "PASS" in first.outcomes.values(), first.outcomes
        assert set(first.outcomes.values()) <= {"PASS", "NOT-APPLICABLE"}, first.findings


def test_abort_may_be_declared_of_a_store(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("Right", "protocol/aborts")
    assert set(run.outcomes.values()) == {"NOT-APPLICABLE"}, run.outcomes  # nothing is handed over
    [abort] = [
        row for row in feature_results(run.results, Criteria(features={"abort": ""})) if row.name == "abort"
    ]
    assert (abort.observed, abort.rule) == ("not looked at", "")


def test_no_answer_is_no_announcement_of_nothing(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("SilentAboutMisses", case=MODEL.partition("[")[0])
    assert run.outcomes == {MODEL: "BLOCKED", DTYPE: "BLOCKED"}, run.findings
    for case, what in ((MODEL, "model"), (DTYPE, "dtype")):
        assert f"another {what} get_num_new_matched_tokens returns None for 2 s" in run.reasons[case]


def test_vllms_example_connector_knows_tokens_and_images_only(run_cases: Callable[[str], CellRun]) -> None:
    run = run_cases("ExampleConnector")
    assert run.failed == {
        *on(f"{OTHER_KEYS}[salt] {OTHER_KEYS}[lora] {OTHER_KEYS}[embeddings]", ""),
        MODEL,
        DTYPE,
        RESET,
    }
    assert run.outcomes[f"{OTHER_KEYS}[image]"] == "PASS"
    assert "returned (-16, False)" in run.findings[f"{OTHER_KEYS}[embeddings]"].happened
