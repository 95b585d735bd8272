"""What stores load of blocks that sampled tokens have filled, or that are being saved, is as computed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed

CASE = "sampled_tokens_are_loaded_as_computed"
UNDER_WAY = "prompts_can_be_loaded_while_they_are_saved"
OTHERS = "tests.right_connectors.stores"
BLOCK = 16


@pytest.fixture(scope="module")
def case_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.wrong_connectors.store.generated", "protocol", ("llama3_1_8b",))
        yield runner
        assert runner.close() == []


@pytest.fixture
def run_case(case_runner: CaseRunner, tmp_path: Path) -> Callable[..., CellRun]:
    """Run a case on a store."""

    def run(store: str, profile: str = "store", case: str = CASE, **declared: int) -> CellRun:
        return case_runner.run(
            store,
            "llama3_1_8b",
            setup="b16",
            profile=profile,
            config=json.dumps({"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}),
            declared=declared,
            only=lambda planned: planned.case.name == case,
        )

    return run


@pytest.mark.parametrize(
    ("store", "profile", "blocks"),
    [
        ("Right", "store", 2 + 4),  # the second and the third prompt: all whole blocks that were computed
        (f"{OTHERS}:Evicts", "store", 2 + 4),
        (f"{OTHERS}:WritesBehind", "store", 1),
        (f"{OTHERS}:LooksUpInTheBackground", "store", 1),
        (f"{OTHERS}:InMemory", "same-engine", 1),
        ("tests.wrong_connectors.live:BlockStore", "store", 1 + 3),  # saves prompts alone
    ],
)
def test_a_right_store_passes(
    run_case: Callable[..., CellRun], store: str, profile: str, blocks: int
) -> None:
    found = run_case(store, profile)
    assert found.outcomes == {CASE: "PASS"}, (found.findings, found.reasons)
    assert found.evidence[CASE].external_tokens >= blocks * BLOCK


def test_prompts_are_as_long_as_a_store_needs_them(run_case: Callable[..., CellRun]) -> None:
    found = run_case("Right", load_granularity=256)
    assert found.outcomes == {CASE: "PASS"}, (found.findings, found.reasons)
    assert found.evidence[CASE].external_tokens == (15 + 17) * BLOCK


def test_a_pair_hands_over_what_p_computed_and_generates_nothing(run_case: Callable[..., CellRun]) -> None:
    found = run_case("reference_connector:ReferenceConnector", "")
    assert found.outcomes == {CASE: "NOT-APPLICABLE"}


@pytest.mark.parametrize(
    "store", ["Right", *(f"{OTHERS}:{name}" for name in ("Evicts", "WritesBehind", "LooksUpInTheBackground"))]
)
def test_a_right_store_announces_only_what_is_saved(run_case: Callable[..., CellRun], store: str) -> None:
    found = run_case(store, case=UNDER_WAY)
    assert found.outcomes == {UNDER_WAY: "PASS"}, (found.findings, found.reasons)
    assert found.evidence[UNDER_WAY].external_tokens > 2 * 4 * BLOCK  # not only what P alone has saved


def test_no_other_engine_loads_from_a_store_of_one_engine(run_case: Callable[..., CellRun]) -> None:
    assert run_case(f"{OTHERS}:InMemory", "same-engine", UNDER_WAY).outcomes == {UNDER_WAY: "NOT-APPLICABLE"}
