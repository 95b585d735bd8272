"""Right connectors pass on a bad transport, in as many transfers as they make."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.case_runner import CellRun

LLAMA, KIMI = "llama3_1_8b", "kimi_linear_48b"


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
