"""Whose failure it is when an engine raises, hangs or dies: the connector's, or vLLM's and the machine's.

vllm_fault/sitecustomize.py breaks vLLM itself. wrong_connectors/later.py makes vLLM fail outside of any hook.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_kvconform.rigs.cluster.control import shows_connector
from pytest_kvconform.rigs.context import SubjectFacts
from pytest_kvconform.rigs.processes.stacks import last_stacks, stack_of
from pytest_kvconform.verdict import EXIT_CODES
from tests.helpers.case_runner import CaseRunner
from tests.helpers.fixtures import ROOT, importable_from
from tests.helpers.rings import night

from .command import Run

FAULT = Path(__file__).parent / "vllm_fault"
SHORT = 0.15  # of the deadlines, so that hanging engines are found soon
ALONE = "vLLM fails here without the connector, too: "
Fault = Callable[[str], None]


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fault") / "fault"


@pytest.fixture(scope="module", params=["engine", night("bytes")])
def broken(request: pytest.FixtureRequest, fault_file: Path) -> Iterator[CaseRunner]:
    """A zygote whose vLLM fails as the file says."""
    fault_file.write_text("")
    with importable_from(ROOT):
        with importable_from(FAULT), pytest.MonkeyPatch.context() as patch:  # no other zygote has this vLLM
            patch.setenv("VLLM_FAULT", str(fault_file))
            case_runner = CaseRunner(tier=request.param, families=("llama",))
        yield case_runner
    assert case_runner.close() == []


def names(case_runner: CaseRunner) -> dict[str, str]:
    """Family, setup and two variants of a tier: prompts of 33 and 64 tokens, or of the nearest lengths."""
    if case_runner.tier == "engine":
        return {"family": "llama", "setup": "", "bad": "n33", "good": "n64"}
    return {"family": "llama3_1_8b", "setup": "b16", "bad": "n17", "good": "n55"}


@pytest.mark.parametrize("way", [night("raises"), "hangs", "ends"])
@pytest.mark.parametrize("topology", ["P1D1", "P1D2"])
def test_a_kernel_that_fails_is_not_the_connectors_fault(
    broken: CaseRunner, fault_file: Path, way: str, topology: str
) -> None:
    which = names(broken)
    place = "kernel" if broken.tier == "engine" else "scheduler"
    if broken.tier == "bytes" and topology == "P1D2" and way != "raises":
        return  # the same process fails
    fault_file.write_text(f"{place} {way} {which['bad'][1:]}")
    run = broken.run(
        "Right",
        which["family"],
        topology,
        setup=which["setup"],
        variants=f"{which['bad']} {which['good']}",
        scale=SHORT,
    )
    blocked = [result for result in run.results if result.outcome == "BLOCKED"]
    assert run.verdict.word == "INCOMPLETE", run.outcomes
    assert {result.id.rpartition("-")[2] for result in blocked} == {f"{which['bad']}]"}
    [reason] = {result.reason for result in blocked}
    assert reason.startswith(ALONE)
    words = {
        "raises": r"[PD] raised (RuntimeError|WorkerDied).*",
        "hangs": r"[PD] did not answer within \d+ s.*|[PD]'s request is .*",
        "ends": r"[PD] left with exit code 7.*|P raised WorkerDied.*",
    }
    assert re.fullmatch(words[way], reason.removeprefix(ALONE)), reason
    of_good = {name: outcome for name, outcome in run.outcomes.items() if f"[{which['good']}]" in name}
    assert set(of_good.values()) == {"PASS"}
    of_bad = {name for name, outcome in run.outcomes.items() if outcome == "BLOCKED"}
    assert of_good.keys() >= {name.replace(which["bad"], which["good"]) for name in of_bad}


def test_engines_that_never_start_are_not_the_connectors_fault(broken: CaseRunner, fault_file: Path) -> None:
    if broken.tier == "bytes":
        return  # a byte engine has no model runner that could fail
    fault_file.write_text("start raises")
    run = broken.run("Right", "llama", variants="n33")
    assert set(run.outcomes.values()) == {"BLOCKED"}
    assert {result.reason.partition(" did not start")[0] for result in run.results} == {f"{ALONE}P"}


LATER = {
    "ReportsStrangers": r"D raised AssertionError.*",
    "AnnouncesTooMuch": r"D raised AssertionError.*",
    "EndsFromThread": r"D left with exit code 9.*",
    "KeepsInterpreter": r"D did not answer within 3 s.*",
}


@pytest.mark.parametrize("connector", LATER)
def test_a_connector_after_which_vllm_fails_is_blamed(case_runner: CaseRunner, connector: str) -> None:
    run = case_runner.run(connector, "llama", variants="n33", scale=SHORT)
    finding = run.findings["completes[n33]"]
    assert run.verdict.word == "VIOLATES"
    assert re.fullmatch(LATER[connector], finding.happened), finding.happened
    frames = finding.differs
    assert "wrong_connectors" not in frames, "the oracle was not needed"


def test_the_command_ends_as_incomplete(
    command: Run, fault_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault_file.write_text("kernel raises 33")
    monkeypatch.setenv("VLLM_FAULT", str(fault_file))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAULT), os.environ.get("PYTHONPATH", "")]))
    run = command("tests.wrong_connectors.engine:Right", "-k", "n33 or n64 or engines_start")
    assert (run.code, run.word) == (EXIT_CODES["INCOMPLETE"], "INCOMPLETE"), run.text
    said = f"could not run here: {ALONE}P raised RuntimeError in step: expect x to be transposed"
    assert [line for line in run.lines if line.startswith("INCOMPLETE: ") and line.endswith(said)], run.text


# ---- stacks ----------------------------------------------------------------------------------------

FACTS = SubjectFacts(
    name="C", module="mine.kv", file="/x/mine/kv.py", supports_hma=True, vllm="0.32.0", device="cpu"
)
VLLM = "/lib/vllm/v1/core/sched/scheduler.py"
STACKS = [
    ((VLLM, 1, "schedule"), False),
    (("/x/mine/transfer.py", 1, "poll"), True),  # the package of the class
    (("/x/other/base.py", 1, "start_load_kv"), True),  # a hook that it inherits
    (("/lib/vllm/v1/executor/abstract.py", 1, "shutdown"), False),  # vLLM has such names, too
    (("/lib/vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py", 1, "_pop"), True),
]


@pytest.mark.parametrize(("frame", "shown"), STACKS, ids=lambda value: str(value))
def test_code_of_the_connector_in_a_stack(frame: tuple[str, int, str], shown: bool) -> None:
    assert shows_connector([(VLLM, 7, "step"), frame], FACTS) is shown


def test_a_connector_without_a_package_is_one_file() -> None:
    facts = SubjectFacts(name="C", module="kv", file="/x/kv.py", supports_hma=True, vllm="", device="")
    assert shows_connector([("/x/kv.py", 1, "anything")], facts)
    assert not shows_connector([("/x/else.py", 1, "anything")], facts)


def test_the_stack_of_an_exception_has_its_causes() -> None:
    def start_load_kv() -> None:
        raise KeyError

    def step() -> None:
        try:
            start_load_kv()
        except KeyError as error:
            raise ValueError from error

    with pytest.raises(ValueError) as raised:
        step()
    assert "start_load_kv" in [name for *_, name in stack_of(raised.value)]


LOG = """Traceback (most recent call last):
  File "/x/mine/kv.py", line 3, in start_load_kv
    raise ValueError
ValueError: somebody caught it
Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/x/mine/kv.py", line 9 in poll
  File "/lib/threading.py", line 1 in run

Current thread 0x00007f02 (most recent call first):
  File "/lib/vllm/a.py", line 12 in kernel
  File "/lib/vllm/b.py", line 13 in step

Extension modules: numpy
Traceback (most recent call last):
  File "/lib/vllm/c.py", line 14, in leave
    sys.exit(3)
    ~~~~~~~~^^^
SystemExit: 3
"""


def test_only_threads_that_ended_or_hang_count() -> None:
    assert [name for *_, name in last_stacks(LOG)] == ["kernel", "step", "leave"]
