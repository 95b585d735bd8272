"""A run has the scenarios between peers that its cases observe, all at once, and those that these need. The
finding about one of them has the calls about its own requests.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_kvconform.kvspace.kinds import SAME
from pytest_kvconform.kvspace.pools.addresses import COORDINATES
from pytest_kvconform.plan import make_plan
from pytest_kvconform.result import Blocked, Cell, Finding, HarnessError
from pytest_kvconform.rigs.cluster.peers.bench import PeerBench
from pytest_kvconform.rigs.cluster.peers.scenario_engines import together
from pytest_kvconform.rigs.cluster.peers.scenarios import ON_THEIR_OWN, SCENARIOS
from pytest_kvconform.settings import Settings
from pytest_kvconform.suite._peer_observations import was_overwritten
from tests.helpers.case_runner import CaseRunner
from tests.helpers.wrong import SECONDS
from tests.wrong_connectors.table.peers import LEASE, LEASE_S

EVERY = SCENARIOS["P1D1"]


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("sleeping_peer", set()),
        ("restarted_peer", {"stopped_peer"}),  # it comes after that one
        ("garbage_messages", {"unreachable_peer", "silent_peer"}),  # it needs them beside it
        ("load_on_idle_engine", {"hand_overs"}),
        ("another_model", None),  # of `ON_THEIR_OWN`
    ],
)
def test_a_scenario_runs_with_those_that_it_needs(name: str, others: set[str] | None) -> None:
    found = together(EVERY, {name})
    assert set(found) == (set() if others is None else {name, *others})
    assert list(found) == [one for one in EVERY if one in found]


@pytest.mark.parametrize(
    ("module", "runs"),
    [
        ("late_writes", [{"sleeping_peer"}]),
        ("lease", [{one for one, scenario in EVERY.items() if scenario.waits_for_lease}]),
        ("two_peers", [{"two_peers", "two_readers"}]),
    ],
)
def test_a_module_runs_its_own_scenarios(
    case_runner: CaseRunner, monkeypatch: pytest.MonkeyPatch, module: str, runs: list[set[str]]
) -> None:
    ran = []

    def run(bench: PeerBench, cell: Cell, scenarios: dict[str, Any]) -> None:
        ran.append(set(scenarios))
        raise Blocked("no engine was started")

    monkeypatch.setattr(PeerBench, "_run", run)
    found = case_runner.run(
        "Right",
        "llama3_1_8b",
        setup="b16",
        matrix="full",
        config=LEASE.replace(SECONDS, str(LEASE_S)),
        only=lambda planned: planned.module == f"protocol/peers/{module}",
    )
    assert ran == runs
    assert set(found.reasons.values()) == {"no engine was started"}


def test_scenarios_of_their_own_rules_share_no_engine() -> None:
    """What kills an engine in one of them, such as the handshake with another model, fails no other rule."""
    names = [name for one in ON_THEIR_OWN.values() for name in (*one.engines, *one.other_engines)]
    assert len(set(names)) == len(names)


def test_cases_declare_scenarios_that_exist() -> None:
    plan = make_plan(Settings(connector="NixlConnector", tier=("protocol",), matrix="full"), ())
    mine = [planned for planned in plan.selected if planned.case.rig == "peers"]
    names = {name for scenarios in (ON_THEIR_OWN, *SCENARIOS.values()) for name in scenarios}
    assert {name for planned in mine for name in planned.scenarios} == names
    for planned in mine:
        known = {*ON_THEIR_OWN, *SCENARIOS[planned.cell.topology]}
        assert known.intersection(planned.scenarios), planned.id


def test_a_case_observes_no_scenario_that_it_does_not_declare() -> None:
    bench = PeerBench(None)  # type: ignore[arg-type]  # nothing is run
    bench.expect(["stopped_peer"], EVERY)
    with pytest.raises(HarnessError, match="observes the scenario silent_peer, and does not declare it"):
        bench.observe(Cell("llama3_1_8b", "P1D1", "b16"), "silent_peer")


def finding_of(case_runner: CaseRunner, connector: str, topology: str, case: str) -> Finding:
    run = case_runner.run(
        connector,
        "llama3_1_8b",
        topology,
        setup="b16",
        matrix="full",
        config=LEASE.replace(SECONDS, str(LEASE_S)),
        only=lambda planned: planned.case.name == case,
    )
    [finding] = run.findings.values()
    return finding


def test_a_rank_that_reports_twice_is_seen_to_do_so(case_runner: CaseRunner) -> None:
    finding = finding_of(case_runner, "RepeatsItself", "P1D2", "each_rank_reports_once")
    named = re.search(r"rank 1 of D named request (\S+) 2 times", finding.happened)
    assert named is not None
    reports = [
        call
        for call in finding.calls
        if call.hook == "get_transfer_results" and f"finished_recving: {{'{named[1]}'}}" in call.answer
    ]
    assert {call.rank: call.times for call in reports} == {0: 1, 1: 2}
    assert {call.side[0] for call in reports} == {"D"}  # the engines of scenarios have numbers
    asked = [call for call in finding.calls if call.hook == "get_num_new_matched_tokens"]
    assert named[1] in {id for call in asked for id in call.requests}


def test_the_calls_about_an_aborted_request_are_shown(case_runner: CaseRunner) -> None:
    """The request has no end that the scenario looks at."""
    finding = finding_of(case_runner, "DropsAborted", "P1D1", "aborted_load_is_reported_at_its_end")
    of_d = [call for call in finding.calls if call.side[0] == "D"]
    aborted = of_d[0].requests  # the first one that D was given
    hooks = [call.hook for call in of_d if call.requests == aborted]
    assert hooks.index("update_state_after_alloc") < hooks.index("request_finished_all_groups")
    [early] = [call for call in of_d if f"finished_recving: {{'{aborted[0]}'}}" in call.answer]
    assert early.hook == "get_transfer_results"


@pytest.mark.parametrize(
    ("owners", "engine", "since"),
    [((36, 200), 0, True), ((36, 3), 0, False), ((36, 200), 1, False), ((), 0, False)],
    ids=["later requests", "an earlier one", "D's own words", "nothing wrong"],
)
def test_words_of_later_requests_of_p_were_written_since(
    owners: tuple[int, ...], engine: int, since: bool
) -> None:
    """The request has the number 5; numbers are given in the order of time."""
    runs = np.zeros(len(owners), dtype=[("kind", "u1"), ("found", COORDINATES), ("expected", COORDINATES)])
    runs["kind"], runs["found"]["owner"], runs["found"]["engine"] = SAME + 1, owners, engine
    runs["expected"]["owner"] = 5
    check = SimpleNamespace(pool=SimpleNamespace(wrong=len(owners), runs=runs))
    ended: Any = SimpleNamespace(checks=(check,))
    assert was_overwritten(ended) is since
