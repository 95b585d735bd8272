"""The scheduler rig does what its documentation says, sees what is left, and explains what dies in it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.case_outcome import CaseEnd
from pytest_kvconform.result import Blocked, Cell, Outcome
from pytest_kvconform.rigs.bench import Bench, Benches
from pytest_kvconform.rigs.cluster.scripts.failures import NOT_SHOWN
from pytest_kvconform.rigs.engine.stopped import SchedulerStopped
from pytest_kvconform.rigs.processes.hangs import LEFT_OUT_S
from pytest_kvconform.rigs.scheduler import rig as rig_module
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from pytest_kvconform.suite.interface.shutdown import shutdown_twice_is_harmless
from tests.helpers.case_runner import CaseRunner
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed
from tests.rigs import scheduler_cases

BEFORE = inspect.getsource(scheduler_cases).partition("# here it hangs")[0]
HANGS = rf"outside of any hook \(scheduler_cases\.py:{1 + BEFORE.count(chr(10))}\)"
PLACE = r"\(scheduler_cases\.py:\d+\)"
PASSED = CaseEnd(outcome=Outcome.PASS, evidence=scheduler_cases.DONE)
Run = Callable[..., CaseEnd]


@pytest.fixture(scope="module")
def case_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        case_runner = CaseRunner("tests.wrong_connectors.scheduler", "protocol", ("llama3_1_8b",))
        yield case_runner
    assert case_runner.close() == []


@pytest.fixture(scope="module")
def benches(case_runner: CaseRunner) -> Iterator[Callable[[str, float], Bench]]:
    made: dict[tuple[str, float], Benches] = {}

    def bench(topology: str, scale: float) -> Bench:
        if (topology, scale) not in made:
            settings = Settings(
                connector="NixlConnector", tier=("protocol",), family=("llama3_1_8b",), timeout_scale=scale
            )
            facts = case_runner.probe(settings)
            made[topology, scale] = Benches(
                case_runner.zygote.address, resolve(settings), settings, facts, lambda sentence: None
            )
        return made[topology, scale].at(Cell("llama3_1_8b", topology, "b16"))

    yield bench
    for one in made.values():
        one.close()


@pytest.fixture
def run(benches: Callable[[str, float], Bench]) -> Run:
    """run("hands_over") -> how the case ended."""

    def run(name: str, variant: Any = None, topology: str = "P1D1", scale: float = 3.0) -> CaseEnd:
        end: CaseEnd = getattr(scheduler_cases, name)(benches(topology, scale), variant)
        return end

    return run


@pytest.mark.parametrize(
    "name", ["hands_over", "remembers_calls", "preempts_starves_and_hits", "ends_by_stop_abort_and_length"]
)
def test_what_the_rig_promises(run: Run, name: str) -> None:
    assert run(name) == PASSED


def test_every_rank_of_a_side_reports(run: Run) -> None:
    assert run("waits_for_every_rank", topology="P1D2") == PASSED


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("none", ""),
        ("block", "1 of 100 blocks were not freed; blocks 263 still have owners"),
        ("taken", "1 of 100 blocks were not freed"),
        ("queue", "scheduler.failed_recving_kv_req_ids holds cmpl-P0-0000"),
        ("group", "group 0 still has blocks of cmpl-P0-0000"),
        ("memory", "the connector names 1 of them at connector_scheduler.cache.item.x.item"),
    ],
)
def test_the_leak_check_sees_a_planted_leak(run: Run, what: str, says: str) -> None:
    end = run("sees_what_is_left", what)
    assert end == CaseEnd(outcome=Outcome.NOT_APPLICABLE, reason=says)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("bug", "ZeroDivisionError: ours"),
        ("harness", "no room"),
        ("nothing", "the case fails passed without evidence: it returned None"),
        ("params", "a case gave params that are no JSON: Object of type object is not JSON serializable"),
    ],
)
def test_a_mistake_of_ours_is_no_violation(run: Run, how: str, reason: str) -> None:
    end = run("fails", how)
    assert (end.outcome, end.reason) == (Outcome.HARNESS, reason)
    assert "Traceback" in end.defect and ("scheduler_cases.py" in end.defect or how == "nothing")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", r"^the process of vLLM's scheduler ended with exit code 3, outside of any hook$"),
        (
            "collect",
            r" did not end within [0-9.]+ s, in garbage collection \(threading\.py:\d+\)",
        ),
        ("delete", r" did not end within [0-9.]+ s, in an object's __del__ \(threading\.py:\d+\)"),
    ],
)
def test_a_process_that_dies_or_hangs_is_explained(run: Run, how: str, says: str) -> None:
    end = run("fails", how, scale=3.0 if how == "exit" else 0.1)
    assert end.outcome is Outcome.FAIL and end.finding is not None and end.finding.rule == "KV-HOOK-002"
    assert re.search(says, end.finding.happened)
    left = "an object waits in its __del__, such as a zmq.Context that shutdown() has not closed"
    assert end.finding.diagnosis == ("" if how == "exit" else left)
    if how != "exit":  # the innermost frames, and none of the rig
        assert any("scheduler_cases.py" in line for line in end.finding.log)
        assert not any("/rigs/scheduler/" in line for line in end.finding.log)


def test_a_hang_without_the_connector_in_its_stack_is_not_the_connector_s(run: Run) -> None:
    end = run("fails", "hang", scale=0.107)  # a bench of its own
    assert (end.outcome, end.finding) == (Outcome.BLOCKED, None)
    hangs = rf"the process of vLLM's scheduler did not end within [0-9.]+ s, {HANGS}"
    assert re.fullmatch(rf"{hangs}{NOT_SHOWN}", end.reason)


def test_a_forked_process_ends_by_the_connector_s_fault_only_if_that_shows(run: Run) -> None:
    case, scale = "worker_beside_ends", 0.51  # of a bench of its own
    hangs = rf"the process of P's worker half did not end within [0-9.]+ s, {{}} {PLACE}"
    end = run(case, "leaves")
    assert end.finding is not None and end.finding.rule == "KV-HOOK-002"
    assert end.finding.happened == "P's worker half ended its process at the start"
    end = run(case, "start_load_kv", scale=scale)
    assert end.finding is not None and end.finding.rule == "KV-HOOK-002"
    assert re.fullmatch(hangs.format("in start_load_kv"), end.finding.happened), end.finding.happened
    end = run(case, "waits", scale=scale)
    assert end.outcome is Outcome.BLOCKED
    assert re.fullmatch(hangs.format("outside of any hook") + NOT_SHOWN, end.reason), end.reason
    end = run(case, "killed")
    assert end.outcome is Outcome.HARNESS
    assert re.match(r"P's worker half \(process \d+\) was killed by SIGKILL, exit code 137", end.reason)


def test_a_case_whose_hooks_are_called_does_not_hang(run: Run) -> None:
    """A store may need some milliseconds for each of hundreds of requests."""
    assert run("fails", "slow", scale=0.12) == PASSED
    end = run("fails", "busy", scale=0.12)
    still = "after 7.2 s the case still calls hooks of the connector: try --kv-timeout-scale"
    assert (end.outcome, end.reason) == (Outcome.BLOCKED, still)


def test_a_case_whose_hooks_take_long_hangs(run: Run) -> None:
    end = run("fails", "few", scale=0.13)
    assert end.outcome is Outcome.FAIL and end.finding is not None and end.finding.rule == "KV-HOOK-002"
    assert "did not end within 1.3 s, in request_finished" in end.finding.happened


def test_an_engine_may_take_as_long_to_start_as_in_the_other_tiers(run: Run) -> None:
    scale = 0.104  # a bench of its own: a case may take a second, and a start nine
    assert run("starts_in", 1.8, scale=scale) == PASSED
    end = run("starts_in", 60.0, scale=scale)
    assert end.finding is not None and end.finding.rule == "KV-HOOK-002"
    assert "did not end within 9.36 s, in __init__ of the worker half" in end.finding.happened


def test_a_case_that_waits_for_leftovers_does_not_hang(run: Run) -> None:
    """It waits for 4 s, and its deadline is 1.08 s."""
    assert run("waits_in_vain_for_leftovers", scale=0.108) == PASSED


@pytest.mark.parametrize(
    ("part", "core", "before", "left_out"),
    [
        (0.1, 0.0, 0.0, 0.35),  # the last part is longer than what is left of the wait
        (0.1, 0.05, 0.0, 0.35),  # half of each part the thread waits for a core
        (0.9, 0.0, 0.0, 0.35),  # a hook takes longer than the wait
        (0.1, 0.0, LEFT_OUT_S - 0.15, 0.15),
    ],
    ids=["parts", "core", "hook", "most"],
)
def test_a_case_leaves_out_no_more_than_it_waits(
    monkeypatch: pytest.MonkeyPatch, part: float, core: float, before: float, left_out: float
) -> None:
    """The wait has a deadline of 0.35 s. `part`: seconds between two yields, `core`: of them those in which
    the thread waits for a core. `before`: seconds that the case has left out before.
    """
    now, waited, told = 100.0, 7.0, list[float]()
    monkeypatch.setattr(rig_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(rig_module, "own_core_wait", lambda: waited)
    began = now, waited
    counted = SimpleNamespace(left=lambda: 0.35 - (now - began[0]) + (waited - began[1]))
    host: Any = SimpleNamespace(hook=SimpleNamespace(leave_out=told.append))
    rig = Rig(host, scheduler_cases.RULE, left_out=before)
    for _ in rig.waits(counted):  # type: ignore[arg-type]
        now, waited = now + part, waited + core
    assert sum(told) == pytest.approx(left_out) and rig.left_out == pytest.approx(before + left_out)


def test_a_start_that_has_hung_is_not_waited_for_as_long_again(run: Run) -> None:
    scale = 0.105  # a bench of its own
    for seconds in ("9.45", "1.89"):
        end = run("starts_in", 60.0, scale=scale)
        assert end.finding is not None and f"did not end within {seconds} s" in end.finding.happened


def test_waiting_for_a_device_neither_ends_the_run_nor_shortens_later_starts(run: Run) -> None:
    scale = 0.106  # a bench of its own
    says = "vLLM's worker did not end within 9.54 s, in init_device: try fewer workers with -n"
    first = run("waits_for_its_device", scale=scale)
    assert run("starts_in", 0.0, scale=scale) == PASSED
    again = run("waits_for_its_device", scale=scale)  # waits as long
    assert [(end.outcome, end.reason) for end in (first, again)] == [(Outcome.BLOCKED, says)] * 2


def test_cases_that_hang_end_those_of_their_module_alone(
    run: Run, benches: Callable[[str, float], Bench]
) -> None:
    short = 0.11  # a bench of its own
    assert [run("fails", "hang", scale=short).outcome for _ in range(2)] == [Outcome.BLOCKED] * 2
    no_other = "the first is fails: no other case of it is started"
    with pytest.raises(Blocked, match=f"^2 cases of scheduler_cases did not end in time, {no_other}$"):
        run("fails", "hang", scale=short)
    other: Any = shutdown_twice_is_harmless
    assert other(benches("P1D1", short), "half_built").outcome is not Outcome.BLOCKED


def test_a_case_that_is_killed_is_no_violation_and_ends_the_run(run: Run) -> None:
    end = run("fails", "killed")
    assert (end.outcome, end.ends_run) == (Outcome.HARNESS, True)
    assert re.match(
        r"the process of a case of \S+ \(process \d+\) was killed by SIGKILL, exit code 137, which the suite "
        r"did not send: most likely the machine ran out of memory; ",
        end.reason,
    )


def test_a_case_sees_nothing_of_the_case_before(run: Run) -> None:
    for _ in range(2):
        assert run("fails", "state").reason == "1"


def test_an_assertion_about_a_report_says_what_the_workers_did() -> None:
    with pytest.raises(AssertionError) as raised:
        scheduler_cases.Scheduler()._update_from_kv_xfer_finished("a")
    finding = SchedulerStopped("P0", raised.value, "").finding
    assert finding.diagnosis.startswith("the workers report a request that vLLM has freed")
    assert finding.happened.endswith("in _update_from_kv_xfer_finished)")
