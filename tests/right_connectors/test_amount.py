"""How much is loaded is the connector's choice, and a declared amount is held to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from pytest_kvconform.plan import PlannedCase
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed

ALL_WHOLE_BLOCKS = "d_loads_all_whole_blocks"
VARIANTS = "n2 n17 n55 two_at_once chunked hit1 hit3"
CHUNKS, LEAST = {"load_granularity": 256}, {"min_load": 40}


@pytest.fixture(scope="module")
def byte_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.right_connectors.amount", "bytes", ("llama3_1_8b", "gpt_oss_20b"), "quick")
        yield runner
        assert runner.close() == []


def of_transfers(planned: PlannedCase) -> bool:
    return planned.module != "bytes/transport_faults"


@pytest.fixture
def transfers(byte_runner: CaseRunner) -> Callable[..., CellRun]:
    """Run the cases of whole transfers of one cell of the byte rig."""

    def run(
        connector: str, declared: dict[str, int] | None = None, variants: str = VARIANTS, **more: str
    ) -> CellRun:
        return byte_runner.run(
            connector,
            "llama3_1_8b",
            setup="b16",
            variants=variants,
            only=of_transfers,
            declared=declared,
            **more,
        )

    return run


def names(run: CellRun, outcome: str) -> set[str]:
    return {name for name, found in run.outcomes.items() if found == outcome}


@pytest.mark.parametrize(
    ("connector", "declared", "should"),  # variants that break the SHOULD
    [
        ("Right", None, ""),
        ("OneBlockLess", None, "n17 n55 two_at_once chunked hit1"),
        ("Threshold", None, "n17 hit1"),
        ("Threshold", LEAST, ""),
        ("PartOfABlock", None, "n17 n55 two_at_once chunked hit1"),
        ("Chunked", None, "n17 n55 two_at_once chunked hit1"),
        ("Chunked", CHUNKS, ""),
    ],
)
def test_a_right_connector_breaks_at_most_a_should(
    transfers: Callable[..., CellRun], connector: str, declared: dict[str, int] | None, should: str
) -> None:
    run = transfers(connector, declared)
    assert run.failed == {f"{ALL_WHOLE_BLOCKS}[{variant}]" for variant in should.split()}
    assert names(run, "BLOCKED") == set()
    if not should:
        assert run.verdict.word == "CONFORMS"
    assert sum(evidence.bytes_moved for evidence in run.evidence.values()) > 1_000_000
    assert run.outcomes["attention_kv_arrives[n55]"] == "PASS"


def test_declared_values_are_shown_where_a_case_does_not_apply(transfers: Callable[..., CellRun]) -> None:
    run = transfers("Threshold", LEAST, "n55")
    [result] = [result for result in run.results if result.id.find(ALL_WHOLE_BLOCKS) > 0]
    assert result.outcome.value == "NOT-APPLICABLE" and "min_load = 40 is declared" in result.reason


def test_values_beyond_every_prompt_are_blocked_in_words(transfers: Callable[..., CellRun]) -> None:
    run = transfers("Threshold", {"min_load": 100_000}, "n55")
    assert run.verdict.word == "INCOMPLETE"
    reasons = {result.reason for result in run.results if result.outcome.value == "BLOCKED"}
    assert all(reason.startswith("min_load = 100000 is declared, and the suite has no") for reason in reasons)
    assert reasons


@pytest.mark.parametrize(
    ("connector", "declared", "finding"),
    [
        ("MovesNothing", None, r"get_num_new_matched_tokens announced nothing$"),
        ("MovesNothing", CHUNKS, r"get_num_new_matched_tokens announced nothing$"),
        ("OneBlockLess", {"load_granularity": 16}, r"announced less than the connector declares: load_gran"),
        ("OneBlockLess", CHUNKS, r"no multiple of what the connector declares: load_granularity = 256$"),
        ("PartOfABlock", {"load_granularity": 16}, r"announced less than the connector declares: load_gran"),
        ("PartOfABlock", {"min_load": 16}, r"announced less than the connector declares"),
    ],
)
def test_a_wrong_connector_breaks_the_must(
    transfers: Callable[..., CellRun], connector: str, declared: dict[str, int] | None, finding: str
) -> None:
    run = transfers(connector, declared, "n55")
    assert names(run, "FAIL") - {f"{ALL_WHOLE_BLOCKS}[n55]"} == {"d_computes_only_missing_tokens[n55]"}
    broken = run.findings["d_computes_only_missing_tokens[n55]"]
    assert broken.rule == "KV-HANDOVER-002" and re.search(finding, broken.diagnosis)
    assert run.verdict.word == "VIOLATES"


@pytest.mark.parametrize("declared", [None, LEAST])
def test_transfers_with_faults_are_long_enough(
    byte_runner: CaseRunner, declared: dict[str, int] | None
) -> None:
    run = byte_runner.run(
        "Threshold", "llama3_1_8b", setup="b16", variants="failed", only=of_faults, declared=declared
    )
    assert run.outcomes["next_transfer_is_right[failed]"] == "PASS" and run.failed == set()


def of_faults(planned: PlannedCase) -> bool:
    return planned.module == "bytes/transport_faults"


@pytest.fixture(scope="module")
def scheduler_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.right_connectors.amount", "protocol", ("llama3_1_8b", "gemma3_1b"), "full")
        yield runner
        assert runner.close() == []


@pytest.mark.parametrize(
    ("connector", "declared"),
    [
        ("OneBlockLess", None),
        ("LessWhenBusy", None),
        ("Threshold", None),
        ("Threshold", LEAST),
        ("Chunked", CHUNKS),
    ],
)
def test_the_scheduler_half_of_a_right_connector_conforms(
    scheduler_runner: CaseRunner, connector: str, declared: dict[str, int] | None
) -> None:
    cases = {
        "load_starts_after_the_local_hit",
        "load_fills_the_allocated_blocks",
        "step_loop_hooks_return_at_once",
    }
    run = scheduler_runner.run(
        connector,
        "llama3_1_8b",
        setup="b16",
        only=lambda planned: planned.case.name in cases,
        declared=declared,
    )
    assert set(run.outcomes.values()) <= {"PASS", "NOT-APPLICABLE"}
    assert run.outcomes["step_loop_hooks_return_at_once[worker]"] == "PASS"
    assert run.outcomes["load_fills_the_allocated_blocks[no_hit]"] == "PASS"
    assert run.outcomes["load_starts_after_the_local_hit[3b_b]"] == "PASS"


def test_a_busy_engine_may_load_less(scheduler_runner: CaseRunner) -> None:
    run = scheduler_runner.run(
        "LessWhenBusy",
        "llama3_1_8b",
        setup="b16",
        matrix="full",
        only=lambda planned: planned.case.name == "abort_leaves_other_requests_alone",
    )
    assert {name: finding.rule for name, finding in run.findings.items()} == {
        f"abort_leaves_other_requests_alone[{state}]": "KV-HANDOVER-003" for state in ("begun", "loading")
    }


@pytest.mark.parametrize("declared", [None, {"load_granularity": 1}])
@pytest.mark.parametrize("connector", ["LessNowAndThen", "MoreNowAndThen"])
def test_two_engines_may_load_different_amounts(
    scheduler_runner: CaseRunner, connector: str, declared: dict[str, int] | None
) -> None:
    cases = {"params_are_read_by_key", "null_keys_may_be_left_out"}
    run = scheduler_runner.run(
        connector,
        "llama3_1_8b",
        setup="b16",
        matrix="full",
        only=lambda planned: planned.case.name in cases,
        declared=declared,
    )
    assert len(run.outcomes) == 4
    if declared:
        assert set(run.outcomes.values()) == {"PASS"}, run.findings
    else:
        rules = {name: finding.rule for name, finding in run.findings.items()}
        assert rules == dict.fromkeys(run.outcomes, "KV-HANDOVER-003"), run.findings


def test_a_load_after_a_hit_may_end_later_than_without_one(scheduler_runner: CaseRunner) -> None:
    run = scheduler_runner.run(
        "MoreNowAndThen",
        "llama3_1_8b",
        setup="b16",
        matrix="full",
        only=lambda planned: planned.case.name == "load_starts_after_the_local_hit",
    )
    assert set(run.outcomes.values()) == {"PASS", "NOT-APPLICABLE"}, run.findings
    assert run.outcomes["load_starts_after_the_local_hit[3b_b]"] == "PASS"


@pytest.mark.parametrize(
    ("connector", "declared", "family", "cases"),
    [
        ("Threshold", LEAST, "llama3_1_8b", "many_loads_in_flight_arrive"),
        ("Chunked", CHUNKS, "llama3_1_8b", "many_loads_in_flight_arrive load_without_room_starts_later"),
        ("Threshold", LEAST, "gemma3_1b", "load_without_room_starts_later abort_leaves_other_requests_alone"),
    ],
)
def test_p_has_room_for_longer_prompts(
    scheduler_runner: CaseRunner, connector: str, declared: dict[str, int], family: str, cases: str
) -> None:
    run = scheduler_runner.run(
        connector,
        family,
        setup="b16",
        matrix="full",
        only=lambda planned: planned.case.name in cases.split(),
        declared=declared,
    )
    assert set(run.outcomes.values()) == {"PASS"}, [result.reason for result in run.results]
    assert len({name.partition("[")[0] for name in run.outcomes}) == len(cases.split())


def test_an_answer_to_a_prompt_that_is_not_loaded_is_not_compared() -> None:
    """D computes both tokens at once, and in bfloat16 this rounds otherwise than the oracle's one token."""
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.right_connectors.amount")
        run = runner.run(
            "Threshold",
            "qwen3_5",
            variants="n2 n4",
            matrix="full",
            only=lambda planned: planned.module == "engine/outputs",
            declared=LEAST,
        )
        assert runner.close() == []
    assert set(run.outcomes.values()) == {"NOT-APPLICABLE"}
    assert all("there is no whole block before the last token" in result.reason for result in run.results)


def test_every_case_with_faults_knows_that_the_start_was_declined(byte_runner: CaseRunner) -> None:
    """Each of them is not applicable if the author declares sliding windows unsupported."""
    with_faults = {"bytes/transport_faults", "bytes/each_transfer"}
    run = byte_runner.run(
        "Chunked",
        "gpt_oss_20b",
        "P2D1",
        setup="b16",
        only=lambda planned: planned.module in with_faults,
        declared=CHUNKS,
    )
    ends = {result.id: (result.outcome.value, result.refused) for result in run.results}
    assert len(ends) > 6 and set(ends.values()) == {("BLOCKED", True)}, ends
