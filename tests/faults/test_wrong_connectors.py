"""A mistake on a bad transport is found by the case about it. Right connectors pass on the same transport."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from pytest_kvconform.plan import load_module
from tests.faults.conftest import MODULES
from tests.helpers.case_runner import CellRun
from tests.helpers.rings import night
from tests.helpers.wrong import Wrong

SHORT = 0.2  # of deadlines, where one of them has to be waited for
LLAMA, GPT, KIMI = "llama3_1_8b", "gpt_oss_20b", "kimi_linear_48b"


def in_transfers(transfers: str, case: str, says: str) -> dict[str, str]:
    return {f"{case}[{transfer}]": says for transfer in transfers.split()}


STOPPED = {
    "attention_kv_arrives",
    "nothing_is_written_after_a_failed_load",
    "all_blocks_are_freed",
    "next_transfer_is_right",
}
OVERWRITTEN = "were read, but after they had been freed and overwritten"
NO_STATE = "reported as if it had been made: no byte of convolution Q .* was written"
WRONG = [
    Wrong(
        "ForgetsFailure",
        in_transfers(
            "failed not_begun",
            "every_request_ends",
            "a transfer that failed is reported as if it had been made: ",
        )
        | in_transfers("failed not_begun", "attention_kv_arrives", "no byte of .* was written"),
        variants="failed not_begun slow",
    ),
    Wrong(
        "ForgetsLaterFailures",
        in_transfers("later", "each_transfer_may_fail", "reported as if it had been made: "),
        variants="failed_handle slow_handle later",
        topology="P2D1",
        family=GPT,
    ),
    Wrong(
        "HidesFailure",
        in_transfers("failed", "every_request_ends", "neither as finished nor as failed"),
        variants="failed",
        blocked=STOPPED,
        scale=SHORT,
        night=True,
    ),
    Wrong(
        "RaisesOnFailure",
        in_transfers("failed", "every_request_ends", "D raised RuntimeError.*no transfer ever fails"),
        variants="failed",
        blocked=STOPPED,
    ),
    Wrong(
        "FailsAll",
        in_transfers("failed", "every_request_ends", "the failure of one request ends others, too"),
        variants="failed",
        blocked={"attention_kv_arrives"},
    ),
    Wrong(
        "FailsTheHit",
        in_transfers("not_begun", "every_request_ends", "D also ended a running request with an error"),
        variants="failed not_begun slow",
    ),
    Wrong(
        "IgnoresRelease",
        in_transfers(
            "lingers",
            "nothing_is_written_after_a_failed_load",
            "while one of its transfers was still under way",
        ),
        variants="failed lingers",
    ),
    Wrong(
        "ClearsLater",
        in_transfers(
            "failed",
            "nothing_is_written_after_a_failed_load",
            "while one of its transfers was still under way",
        ),
        variants="failed",
    ),
    Wrong(
        "LeavesSiblings",
        in_transfers(
            "failed_handle",
            "nothing_is_written_after_a_failed_load",
            "while one of its transfers was still under way",
        ),
        variants="failed_handle slow_handle",
        topology="P2D1",
        family=GPT,
    ),
    Wrong(
        "BearsGrudge",
        in_transfers("failed", "next_transfer_is_right", "the next request of D did not end well"),
        variants="failed",
    ),
    Wrong(
        "NotifiesAtOnce",
        in_transfers("slow_handle", "p_keeps_blocks_until_the_last_read", OVERWRITTEN),
        variants="slow_handle",
        topology="P2D1",
        family=GPT,
    ),
    Wrong(
        "CountsOneReader",
        in_transfers("slow_rank", "p_keeps_blocks_until_the_last_read", OVERWRITTEN),
        variants="slow_rank reversed",
        topology="P1D2",
    ),
    Wrong(
        "KnowsEveryRequest",
        in_transfers("twice", "every_request_ends", r"P raised KeyError"),
        variants="twice notified_late",
        blocked=STOPPED,
    ),
    Wrong(
        "NeverExpires",
        in_transfers(
            "failed not_notified", "all_blocks_are_freed", r"P waits for a notification that will not come"
        ),
        variants="failed not_notified twice",
        scale=SHORT,
    ),
    Wrong(
        "EndsWithTheFirst",
        in_transfers(
            "slow_handle",
            "p_keeps_blocks_until_the_last_read",
            r"rank 0 of D reported its load as finished when \d of the \d transfers that it had begun",
        )
        | in_transfers("P2D1.b16", "load_ends_with_its_last_transfer", "as soon as one of its transfers has"),
        variants="slow_handle",
        topology="P2D1",
        family=GPT,
    ),
    Wrong(
        "EndsWithTheBegin",
        in_transfers("slow", "attention_kv_arrives", r"when none of the \d transfers that it had begun had")
        | in_transfers("P1D1.b16", "load_ends_with_its_last_transfer", "as soon as its transfers have begun"),
        variants="slow",
    ),
    # recurrent states, in transfers of their own
    Wrong(
        "ForgetsSlowState",
        in_transfers("P1D1.mla64", "load_ends_with_its_last_transfer", "as soon as one of its transfers has")
        | in_transfers("later", "each_transfer_may_fail", NO_STATE),
        variants="later",
        family=KIMI,
        setup="mla64",
        night=True,
    ),
    Wrong(
        "ForgetsFailedState",
        in_transfers("later", "each_transfer_may_fail", NO_STATE),
        variants="later",
        family=KIMI,
        setup="mla64",
    ),
    # a transport of its own, and a fault hook
    Wrong(
        "TcpForgetsFailure",
        in_transfers("failed", "every_request_ends", "reported as if it had been made: ")
        | in_transfers("failed", "attention_kv_arrives", "no byte of .* was written")
        | in_transfers("later", "each_transfer_may_fail", "reported as if it had been made: "),
        variants="failed slow later",
    ),
    Wrong(
        "TcpHidesFailure",
        in_transfers("failed", "every_request_ends", "neither as finished nor as failed"),
        variants="failed",
        blocked=STOPPED,
        scale=SHORT,
    ),
    Wrong(
        "TcpEndsWithTheFirst",
        in_transfers("P1D1.b16", "load_ends_with_its_last_transfer", "while a transfer was late"),
        variants="none",
    ),
    Wrong(
        "TcpNeverExpires",
        in_transfers("not_notified", "all_blocks_are_freed", "P waits for a notification that will not come"),
        variants="not_notified",
        scale=SHORT,
    ),
    # Upstream counts messages, not readers.
    Wrong(
        "Upstream",
        in_transfers("twice_slow_rank", "repeated_notification_counts_once", OVERWRITTEN),
        variants="slow_rank twice_slow_rank",
        topology="P1D2",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_mistake_is_caught_by_the_case_about_it(run_cases: Callable[..., CellRun], wrong: Wrong) -> None:
    run = run_cases(wrong.connector, **wrong.cell)
    outcomes = {
        short(name): outcome
        for name, outcome in ((result.id, result.outcome.value) for result in run.results)
    }
    stopped = (
        {name.partition("[")[2] for name in wrong.fails if name.startswith("every_request_ends[")}
        if wrong.blocked
        else set()
    )
    expected = {
        name: "FAIL"
        if name in wrong.fails
        else "BLOCKED"
        if name.partition("[")[0] in wrong.blocked and name.partition("[")[2] in stopped
        else "PASS"
        for name in outcomes
    }
    assert outcomes == expected
    assert wrong.fails.keys() <= outcomes.keys()
    for result in run.results:
        if result.finding:
            assert re.search(
                wrong.fails[short(result.id)], f"{result.finding.happened}\n{result.finding.diagnosis}"
            ), result.finding


def test_every_case_has_a_mistake_that_only_it_finds() -> None:
    """Bytes that a fault makes wrong are found by `attention_kv_arrives` beside the case about the fault."""
    cases = {case.name for module in MODULES for case in load_module(module)[1]}
    of_mistakes = [{case.partition("[")[0] for case in wrong.fails} for wrong in WRONG]
    alone = {min(found) for found in of_mistakes if len(found) == 1}
    assert set().union(*of_mistakes) == cases and cases - alone == {"attention_kv_arrives"}


CELLS = [(LLAMA, "P1D1"), (LLAMA, "P1D2"), (GPT, "P2D1")]


@pytest.mark.parametrize(("family", "topology"), CELLS)
def test_a_right_connector_passes_every_case(
    run_cases: Callable[..., CellRun], family: str, topology: str
) -> None:
    run = run_cases("Right", family, topology, "", 1.0)
    assert len(run.results) > 5
    assert {
        short(result.id): result.outcome.value for result in run.results if result.outcome.value != "PASS"
    } == {}
    assert all(result.evidence and result.evidence.looked_at for result in run.results)


RIGHT = "tests.right_connectors"


@pytest.mark.parametrize(
    ("connector", "declared"),
    [
        ("StatesApart", {}),
        ("Right", {}),
        (f"{RIGHT}.designs:LayerWise", {}),
        (f"{RIGHT}.amount:Threshold", {"min_load": 40}),
    ],
)
def test_a_right_connector_passes_where_each_transfer_of_a_state_is_slow_or_fails(
    run_cases: Callable[..., CellRun], connector: str, declared: dict[str, int]
) -> None:
    run = run_cases(connector, KIMI, setup="mla64", matrix="quick", declared=declared)
    passed = dict.fromkeys(("load_ends_with_its_last_transfer", "each_transfer_may_fail[later]"), "PASS")
    assert run.outcomes == passed, run.reasons
    begun = {evidence.looked_at for evidence in run.evidence.values()}
    assert begun == {1} if connector == "Right" else min(begun) > 1


def test_a_right_connector_with_a_fault_hook_passes_every_case(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("TcpPull", LLAMA, "P1D1", "", 1.0)
    other = {result.id: result.reason for result in run.results if result.outcome.value != "PASS"}
    assert all("kvconform_fault has no such fault" in reason for reason in other.values()), other
    passed = {short(result.id) for result in run.results} - {short(name) for name in other}
    assert passed >= {
        "every_request_ends[failed]",
        "every_request_ends[slow]",
        "nothing_is_written_after_a_failed_load[not_begun]",
        "all_blocks_are_freed[not_notified]",
        "next_transfer_is_right[failed]",
        "load_ends_with_its_last_transfer[P1D1.b16]",
        "each_transfer_may_fail[later]",
    }


@pytest.mark.parametrize("connector", ["LeavesAlone", night("LeavesAloneForGood")])
def test_d_may_compute_for_a_while_after_a_failure(run_cases: Callable[..., CellRun], connector: str) -> None:
    wrong = f"tests.peers.wrong_connectors.unreachable:{connector}"
    run = run_cases(wrong, LLAMA, "P1D1", "failed slow not_begun", 1.0)
    if connector == "LeavesAlone":
        assert set(run.outcomes.values()) == {"PASS"}, run.reasons
    else:
        assert run.failed == {f"next_transfer_is_right[{name}]" for name in ("failed", "not_begun")}
        assert all("loaded nothing" in finding.happened for finding in run.findings.values()), run.findings


def test_the_load_that_fails_may_be_the_only_one(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases(f"{RIGHT}.answers:ComputesWhenBusy", LLAMA, "P1D1", "failed slow", 1.0)
    arrives = "attention_kv_arrives[failed]"
    assert run.outcomes == dict.fromkeys(run.outcomes, "PASS") | {arrives: "NOT-APPLICABLE"}, run.reasons


def test_without_nixl_the_cases_do_not_apply(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("WithoutNixl", LLAMA, "P1D1", "slow failed twice", 1.0)
    assert {result.outcome.value for result in run.results} == {"NOT-APPLICABLE"}
    assert {result.reason for result in run.results} == {
        "needs a connector that moves bytes with NIXL, or that has kvconform_fault (docs/stores.md)"
    }


def short(name: str) -> str:
    """ "every_request_ends[slow]" of an id."""
    case, _, rest = name.rpartition("::")[2].partition("[")
    return f"{case}[{rest.rstrip(']').rpartition('-')[2]}]"
