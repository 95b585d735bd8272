"""Connectors that answer later than at once, or more often than once, pass the cases that could alarm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from pytest_kvconform import rules
from pytest_kvconform.subject import resolve
from tests.helpers import case_runner as runner_of_cases
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures
from tests.helpers.rings import some_at_night

NONE = (
    "returns_int_or_none_and_bool zero_tokens_is_never_async repeated_call_returns_the_same "
    "call_without_free_blocks_starts_no_load load_without_room_starts_later none_is_followed_by_an_answer "
    "loads_the_same_as_alone params_are_read_by_key aborted_load_is_reported_at_its_end"
)
ALONE = "loads_the_same_as_alone every_block_is_freed"
MAY_CHANGE = (
    "repeated_call_returns_the_same call_without_free_blocks_starts_no_load load_without_room_starts_later"
)
CASES = {
    "NoneBySteps": NONE,
    "NoneByTime": NONE,
    "NoneTrue": NONE,
    "NoneForStrangers": f"{NONE} requests_without_own_params_are_ignored",
    "OutOfOrder": f"{ALONE} params_are_read_by_key preempted_blocks_are_never_read_again",
    "StrictBookkeeping": "update_connector_output_takes_any_report",
    "Retries": "failed_load_is_recomputed failed_load_ends_its_request",
    "LoadsAgain": "announces_no_freed_blocks_after_the_load",
    "OneLoadAtATime": (
        "load_without_room_starts_later params_are_read_by_key shares_the_params_dict "
        "abort_leaves_other_requests_alone unreachable_peer_delays_no_other_request "
        "unreachable_peer_delays_no_other_load"
    ),
    "ComputesWhenBusy": "abort_leaves_other_requests_alone shares_the_params_dict loads_the_same_as_alone",
    "OrdersLater": (
        "load_fills_the_allocated_blocks loads_the_same_as_alone corrupted_lists_fail_only_their_request"
    ),
    "AnswersMoreLater": f"{ALONE} {MAY_CHANGE}",
    "ServesOnce": f"params_are_read_by_key {ALONE}",
}
AT_NIGHT = "NoneBySteps NoneByTime NoneForStrangers NoneTrue".split()  # others stay
# Cases that end with a warning: the connector breaks a SHOULD.
WARNS = {"AnswersMoreLater": MAY_CHANGE, "OneLoadAtATime": "unreachable_peer_delays_no_other_load"}
case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.right_connectors.answers", "protocol", ("llama3_1_8b",), "full"),
    lambda case_runner: partial(case_runner.run, setup="b16", matrix="full"),
    scope="module",
)


@pytest.mark.parametrize("connector", some_at_night(CASES, AT_NIGHT))
def test_a_right_connector_passes(run_cases: Callable[..., CellRun], connector: str) -> None:
    names, strengths = set(CASES[connector].split()), rules.load()
    run = run_cases(connector, "llama3_1_8b", only=lambda planned: planned.case.name in names)
    reasons = {
        f"{result.id} {result.outcome.value}": result.finding or result.reason
        for result in run.results
        if result.outcome.value not in ("PASS", "NOT-APPLICABLE")
        and not (result.finding and strengths[result.finding.rule].strength == "SHOULD")
    }
    assert reasons == {}
    passed = {name.partition("[")[0] for name, outcome in run.outcomes.items() if outcome == "PASS"}
    assert passed == names - set(WARNS.get(connector, "").split())


@pytest.mark.parametrize(
    ("connector", "outcome"),
    [("MeetsFirst", "PASS"), ("WantsAReceipt", "PASS"), ("MeetsNobody", "FAIL"), ("LosesALookup", "FAIL")],
)
def test_an_answer_that_waits_for_own_workers_is_told_from_one_that_never_comes(
    run_cases: Callable[..., CellRun], connector: str, outcome: str
) -> None:
    name, case = f"tests.right_connectors.workers:{connector}", "none_is_followed_by_an_answer"
    run = run_cases(name, "llama3_1_8b", only=lambda planned: planned.case.name == case)
    assert run.outcomes == {f"{case}[handed_over]": outcome, f"{case}[plain]": "PASS"}, run.reasons
    for finding in run.findings.values():
        assert finding.rule == "KV-MATCH-006" and finding.happened.endswith("cmpl-D0-0000: it waits")


@pytest.mark.parametrize(
    ("connector", "outcome"), [("workers:MeetsFirst", "BLOCKED"), ("workers:SaysNothing", "FAIL")]
)
def test_an_answer_may_wait_for_workers_that_cannot_run_here(
    run_cases: Callable[..., CellRun], monkeypatch: pytest.MonkeyPatch, connector: str, outcome: str
) -> None:
    monkeypatch.setattr(
        runner_of_cases, "resolve", lambda settings: replace(resolve(settings), requires_device="cuda")
    )
    case = "none_is_followed_by_an_answer"
    run = run_cases(
        f"tests.right_connectors.{connector}",
        "llama3_1_8b",
        variants="handed_over",
        only=lambda planned: planned.case.name == case,
    )
    assert run.outcomes == {f"{case}[handed_over]": outcome}
    for reason in run.reasons.values():
        assert reason.endswith(
            f"{connector[8:]} moves bytes only on cuda, and the installed vLLM runs on cpu"
        )
