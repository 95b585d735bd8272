"""A function of the author stands for his proxy. What is wrong with one is one clear sentence."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pytest_kvconform.rigs.bench import BadSubject, probe_subject
from pytest_kvconform.rigs.processes import author_hook
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from tests.helpers.case_runner import PROBE_S, CaseRunner, CellRun
from tests.helpers.fixtures import fixtures

PROXIES = "tests.handovers.proxies"
PEERS = "protocol/peers/unreachable"
case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.right_connectors.designs", "bytes", ("llama3_1_8b",), "quick"),
    lambda case_runner: partial(_run, case_runner),
    scope="module",
)


def _run(case_runner: CaseRunner, tier: str, connector: str, function: str, **more: Any) -> CellRun:
    runner = copy.copy(case_runner)
    runner.tier = tier
    declared = {"handover": f"{PROXIES}:{function}"}
    return runner.run(connector, "llama3_1_8b", setup="b16", declared=declared, **more)


@pytest.mark.parametrize(("connector", "function"), [("ByRoom", "by_room"), ("Right", "one_after_the_other")])
def test_bytes_arrive(run_cases: Callable[..., CellRun], connector: str, function: str) -> None:
    run = run_cases("bytes", connector, function, variants="n17 two_at_once reused preempted_on_p failed")
    assert run.wrong == {}
    arrived = {name for name, outcome in run.outcomes.items() if outcome == "PASS"}
    assert {"attention_kv_arrives[n17]", "next_transfer_is_right[failed]"} <= arrived


def test_the_same_connector_needs_its_proxy(case_runner: CaseRunner) -> None:
    found = case_runner.run(
        "ByRoom",
        "llama3_1_8b",
        setup="b16",
        declared={"handover": "rendezvous"},
        variants="n17",
        only=lambda planned: planned.module == "bytes/handover",
    )
    assert found.outcomes["d_computes_only_missing_tokens[n17]"] == "FAIL"


def test_schedulers_and_peers(run_cases: Callable[..., CellRun]) -> None:
    modules = ("protocol/kv_transfer_params", "protocol/loads", PEERS)
    run = run_cases("protocol", "ByRoom", "by_room", only=lambda planned: planned.module in modules)
    assert run.wrong == {}
    assert run.outcomes["p_survives_corrupted_params[number]"] == "PASS"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("raises", r"raised KeyError: 'room' \(proxies.py:\d+\)$"),
        ("ends", r"raised SystemExit: 3 \(proxies.py:\d+\)$"),
        ("returns_a_list", r"returned \['P'\]: expected kv_transfer_params, a dict that JSON can hold, or"),
        ("forgets_p", "returned None for P, whose request needs kv_transfer_params$"),
    ],
)
@pytest.mark.parametrize(
    ("tier", "module"), [("bytes", "bytes/handover"), ("protocol", "protocol/loads"), ("protocol", PEERS)]
)
def test_a_wrong_function_blocks(
    run_cases: Callable[..., CellRun], function: str, says: str, tier: str, module: str
) -> None:
    run = run_cases(
        tier,
        "ByRoom",
        function,
        variants="n17" if tier == "bytes" else "",
        only=lambda one: one.module == module,
    )
    assert set(run.outcomes.values()) <= {"BLOCKED", "NOT-APPLICABLE"}
    assert "BLOCKED" in run.outcomes.values()
    for name, reason in run.reasons.items():
        assert run.outcomes[name] != "BLOCKED" or re.match(
            f"the hand-over {PROXIES}:{function} {says}", reason
        ), reason


@pytest.mark.parametrize(
    ("handover", "says"),
    [
        ("no_such_proxy:hand_over", "no module 'no_such_proxy'"),
        (f"{PROXIES}:nothing", f"{PROXIES} has no such function"),
    ],
)
def test_a_function_that_is_not_there(case_runner: CaseRunner, handover: str, says: str) -> None:
    settings = Settings(connector="tests.right_connectors.designs:ByRoom", handover=handover)
    with pytest.raises(BadSubject) as caught:
        probe_subject(case_runner.zygote.address, resolve(settings), PROBE_S)
    assert str(caught.value) == f"the hand-over {handover} is not there: {says}"


def test_params_are_what_http_makes_of_them() -> None:
    """P's params may have tuples, and a function may pass them on."""
    given = {"remote_block_ids": ([1], [2])}
    assert author_hook.call_here(f"{PROXIES}:one_after_the_other", "D", {}, given) == {
        "remote_block_ids": [[1], [2]]
    }
