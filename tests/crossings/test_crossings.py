"""Objects of a connector on the way between processes: none ends as an error of the suite."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pytest_kvconform.case_outcome import run_case
from pytest_kvconform.result import Evidence, Finding, Outcome, Violation, message_of, repr_of
from pytest_kvconform.rigs.processes.linux import threads
from pytest_kvconform.rigs.scheduler.violations import is_of_suite
from pytest_kvconform.rigs.vllm_setup.answers import pickled, that_travels
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, fixtures, importable_from, must_be_installed
from tests.helpers.wrong import Wrong, on

NAME = "tests.crossings.connectors"
DENSE = ("llama3_1_8b",)
PREEMPTED, COMPLETES = "preempted_blocks_are_never_read_again", "completes"
LOST = r"a {} of {} does not survive pickle, with which vLLM sends it between its engine core and its workers"

case_runner, run_cases = fixtures(
    lambda: CaseRunner(NAME, "bytes", DENSE, "full"),
    lambda case_runner: partial(case_runner.run, setup="b16", matrix="full"),
    scope="module",
)


@pytest.fixture(scope="module")
def scheduler_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner(NAME, "protocol", DENSE, "full")
        yield runner
        assert runner.close() == []


def run_some(runner: CaseRunner, connector: str, *cases: str) -> CellRun:
    """Run these cases of the scheduler rig; all variants of each."""
    return runner.run(
        connector,
        DENSE[0],
        setup="b16",
        matrix="full",
        config="",
        only=lambda planned: planned.case.name in cases,
    )


IN_ONE_PROCESS = [
    Wrong(
        "StatisticsRaise",
        on(
            PREEMPTED,
            "RuntimeError: no dict .*, when it called to_dict of the NoDict that get_kv_connector_stats ",
        ),
        rules="KV-HOOK-003",
    ),
    Wrong(
        "RaisesSurrogates", on(PREEMPTED, r"raised RuntimeError: no peer \\udcff here"), rules="KV-HOOK-001"
    ),
    Wrong("RaisesMute", on(PREEMPTED, r"raised Mute: \(ValueError in Mute.__str__\)"), rules="KV-HOOK-001"),
    Wrong("RaisesWithTwoArguments", on(PREEMPTED, "raised NeedsTwo: the door is open"), rules="KV-HOOK-001"),
    Wrong("RaisesWithALock", on(PREEMPTED, "raised HoldsALock: the door is shut"), rules="KV-HOOK-001"),
    Wrong("MetadataHasALock", on(PREEMPTED, "Metadata of build_connector_meta does not survive pickle")),
    Wrong("ParamsHaveALock", on(PREEMPTED, "they reach D through msgpack and JSON, which refuse them")),
    Wrong("AnswersSurrogates", on(PREEMPTED, r"returned \('no peer \\udcff here', False\)")),
    Wrong("AnswersWithoutRepr", on(PREEMPTED, "returned a tuple, whose repr raises ValueError")),
]


@pytest.mark.parametrize("wrong", IN_ONE_PROCESS, ids=str)
def test_live_engines_name_the_object(scheduler_runner: CaseRunner, wrong: Wrong) -> None:
    run = run_some(scheduler_runner, wrong.connector, PREEMPTED)
    assert run.failed == set(wrong.fails), run.reasons
    [(case, pattern)] = wrong.fails.items()
    found = run.findings[case]
    assert re.search(pattern, found.happened), found.happened
    assert found.rule == wrong.rules or not wrong.rules
    msgspec.json.encode(run.results)  # as a report has it


@pytest.mark.parametrize("connector", ["Right", "HasOddStatistics", "StatisticsHaveALock"])
def test_what_stays_in_its_process_may_be_anything(scheduler_runner: CaseRunner, connector: str) -> None:
    """vLLM has the worker of one rank in the process of its engine core (v1/executor/uniproc_executor.py)."""
    run = run_some(scheduler_runner, connector, PREEMPTED)
    assert set(run.outcomes.values()) == {"PASS"}, run.findings


RANKS = [
    Wrong("StatisticsHaveALock", on(COMPLETES, LOST.format("Locked", "get_kv_connector_stats"))),
    Wrong("StatisticsAreLocal", on(COMPLETES, LOST.format("Here", "get_kv_connector_stats"))),
    Wrong("MetadataHasALock", on(COMPLETES, LOST.format("Metadata", "build_connector_meta"))),
    Wrong("WorkerMetadataHasALock", on(COMPLETES, LOST.format("Report", "build_connector_worker_meta"))),
    Wrong(
        "HandshakeHasALock", on("engines_start", LOST.format("HandshakeMetadata", "get_handshake_metadata"))
    ),
    Wrong(
        "ParamsHaveALock", on(COMPLETES, "the kv_transfer_params of request_finished do not reach D: msgpack")
    ),
    Wrong(
        "RaisesWithTwoArguments", on(COMPLETES, r"P raised NeedsTwo in start_load_kv .*: the door is open$")
    ),
    Wrong("RaisesWithALock", on(COMPLETES, r"P raised HoldsALock in start_load_kv .*: the door is shut$")),
    Wrong(
        "RaisesSurrogates", on(COMPLETES, r"P raised RuntimeError in start_load_kv .*: no peer \\udcff here$")
    ),
    Wrong("RaisesMute", on(COMPLETES, r"P raised Mute in start_load_kv .*: \(ValueError in Mute.__str__\)$")),
]


@pytest.mark.parametrize("wrong", RANKS, ids=str)
def test_engines_of_two_ranks_name_the_object(run_cases: Callable[..., CellRun], wrong: Wrong) -> None:
    [(case, pattern)] = wrong.fails.items()
    cases = {COMPLETES, case}
    run = run_cases(
        wrong.connector,
        DENSE[0],
        topology="P2D1",
        variants="n17",
        config="",
        only=lambda planned: planned.case.name in cases,
    )
    assert {name.partition("[")[0] for name in run.failed} == {case}, run.reasons
    assert "HARNESS" not in run.outcomes.values()
    [found] = run.findings.values()
    assert re.search(pattern, found.happened), found.happened
    msgspec.json.encode(run.results)


@pytest.mark.parametrize("connector", ["Right", "HasOddStatistics"])
@pytest.mark.parametrize("topology", ["P1D1", "P2D1"])
def test_unusual_objects_arrive(run_cases: Callable[..., CellRun], connector: str, topology: str) -> None:
    modules = ("bytes/handover", "bytes/pool", "bytes/start", "bytes/statistics")
    run = run_cases(
        connector,
        DENSE[0],
        topology=topology,
        variants="n17 n55 two_at_once",
        config="",
        only=lambda planned: planned.module in modules,
    )
    assert set(run.outcomes.values()) == {"PASS"}, (run.findings, run.reasons)


# ---- parts -------------------------------------------------------------------------------------------------


def test_a_finding_is_text_that_a_report_can_hold() -> None:
    def body() -> Evidence:
        raise Violation(Finding(rule="KV-A-001", happened="\udcff", log=("a\ud800",), diagnosis="ä"))

    end = run_case(body, "a")
    assert end.outcome is Outcome.FAIL
    assert end.finding == Finding(rule="KV-A-001", happened=r"\udcff", log=(r"a\ud800",), diagnosis="ä")
    noted = run_case(lambda: Evidence(looked_at=1, unit="a", notes={"k\udcff": "v\udcff"}), "a")
    assert noted.evidence is not None
    assert noted.evidence.notes == {r"k\udcff": r"v\udcff"}
    reason = run_case(lambda: (_ for _ in ()).throw(RuntimeError("\udcff")), "a").reason
    assert reason == r"RuntimeError: \udcff"
    msgspec.json.encode([end, noted])


def test_what_pickle_refuses_is_named_with_its_hook() -> None:
    output = SimpleNamespace(kv_connector_stats=None, invalid_block_ids={threading.Lock()})
    message = SimpleNamespace(kv_connector_output=output, sampled=[1])
    with pytest.raises(
        pickle.PicklingError, match=r"^a set of get_block_ids_with_load_errors does not survive"
    ):
        pickled(message)
    with pytest.raises(pickle.PicklingError, match=r"^a lock does not survive pickle"):
        pickled(threading.Lock())
    assert pickle.loads(pickled({"a": 1})) == {"a": 1}


def test_an_exception_keeps_its_name_and_message() -> None:
    class Local(ValueError):
        def __init__(self, text: str):
            super().__init__(text)
            self.lock = threading.Lock()

    sent = that_travels(Local("why"))
    assert (type(sent).__name__, str(sent)) == ("Local", "why")
    same = KeyError("a")
    assert that_travels(same) is same


def test_texts_of_foreign_objects_never_raise() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError("a")

        __repr__ = __str__

    assert message_of(Broken()) == "(KeyError in Broken.__str__)"
    assert repr_of(Broken()) == "a Broken, whose repr raises KeyError"


def test_what_an_object_raises_that_vllm_called_is_not_the_suites() -> None:
    def raised_in(*files: str) -> BaseException:
        scope: dict[str, Any] = {}
        for n, file in enumerate(files):
            last = n == len(files) - 1
            exec(compile(f"def f{n}():\n    {'1 / 0' if last else f'f{n + 1}()'}", file, "exec"), scope)
        try:
            scope["f0"]()
        except ZeroDivisionError as error:
            return error
        raise AssertionError

    ours = str(ROOT / "pytest_kvconform" / "rigs" / "a.py")
    vllm, connector, library = (
        "/site-packages/vllm/b.py",
        "/opt/pytest_kvconform/c.py",
        "/site-packages/n.py",
    )
    assert not is_of_suite(raised_in(ours, vllm, connector))
    assert not is_of_suite(raised_in(ours, vllm, connector, library))
    assert not is_of_suite(raised_in(ours, vllm))
    assert is_of_suite(raised_in(ours, vllm, ours, library))
    assert is_of_suite(raised_in(ours, library))


def test_threads_may_have_any_name() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="a\udcffb", daemon=True)
    thread.start()
    try:
        assert "a\udcffb" in threads().values()
    finally:
        end.set()
        thread.join()
