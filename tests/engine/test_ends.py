"""Each run ends with the right word and exit code, and leaves no process, shared memory, file or folder."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from pytest_kvconform.rigs.bench import BadSubject
from pytest_kvconform.settings import Settings
from pytest_kvconform.verdict import EXIT_CODES
from tests.helpers.case_runner import CaseRunner

from .broken_modules import BROKEN
from .command import LEAVE_S, Command, Run, of_nobody

STOPPED_S = 15.0  # for Ctrl-C: the engines are ended, and the report is written

# ---- nothing to test: one sentence, before an engine is up ---------------------------------------

NOT_STARTED = [
    ("NoSuchConnector", "", "vLLM registers no connector 'NoSuchConnector'"),
    ("NixlConector", "", "(did you mean NixlConnector?)"),
    ("a.module.Class", "", "is neither NAME nor MODULE:CLASS (did you mean a.module:Class?)"),
    ("NixlConnector", "--kv-config={not json", "--kv-config: line 1 column 2: Expecting property name"),
    ("NixlConnector", "--kv-config=[1]", "--kv-config: expected a JSON object, got list"),
    (
        "NixlConnector",
        "--kv-config=no_such_file.json",
        "'no_such_file.json' is neither a JSON object nor a file",
    ),
]


@pytest.mark.parametrize(
    ("spec", "option", "sentence"), NOT_STARTED, ids=[f"{row[0]} {row[1]}".strip() for row in NOT_STARTED]
)
def test_a_mistake_in_the_command_is_one_sentence(
    command: Run, spec: str, option: str, sentence: str
) -> None:
    run = command(spec, *filter(None, [option]))
    assert run.code == 4
    assert sum(line.startswith("ERROR: ") and sentence in line for line in run.lines) == 1, run.text
    _ends_clean(run)


def test_a_connector_that_is_not_there_is_one_sentence(command: Run) -> None:
    run = command("no_such_module:C")
    assert run.code == 4
    nowhere = (
        "there is no module 'no_such_module' (looked in the current folder and in this Python's packages)"
    )
    assert run.lines.count(f"ERROR: --kv-connector=no_such_module:C: {nowhere}") == 1, run.text
    _ends_clean(run)


LOOKED_AT = [
    (
        "tests.wrong_connectors.engine:Rigth",
        "",
        "module tests.wrong_connectors.engine has no class 'Rigth' (did you mean Right?)",
    ),
    (
        "tests_of_nobody.inner:C",
        "",
        "there is no module 'tests_of_nobody' (looked in the current folder and in this Python's packages)",
    ),
    (
        "NixlConnector",
        '{"kv_buffer_devise": "cpu"}',
        (
            "--kv-config: vLLM's KVTransferConfig has no field 'kv_buffer_devise' (did you mean "
            "kv_buffer_device?)"
        ),
    ),
]


@pytest.mark.parametrize(
    ("spec", "config", "sentence"), LOOKED_AT, ids=[f"{row[0]} {row[1]}".strip() for row in LOOKED_AT]
)
def test_a_mistake_that_the_probe_finds_is_one_sentence(
    case_runner: CaseRunner, spec: str, config: str, sentence: str
) -> None:
    with pytest.raises(BadSubject) as raised:
        case_runner.probe(Settings(connector=spec, config=config))
    assert str(raised.value) == sentence


@pytest.mark.parametrize("module", BROKEN)
def test_a_module_that_is_broken_is_one_sentence(case_runner: CaseRunner, module: str) -> None:
    with pytest.raises(BadSubject) as raised:
        case_runner.probe(Settings(connector=f"{module}:C"))
    assert re.fullmatch(BROKEN[module][1], str(raised.value))


CONFIGS = [
    ('{"kv_rank": "first"}', "kv_rank"),
    ('{"kv_role": "kv_reader"}', "kv_role"),
    ('{"kv_load_failure_policy": "hope"}', "kv_load_failure_policy"),
]


@pytest.mark.parametrize(("config", "field"), CONFIGS, ids=[field for _, field in CONFIGS])
def test_a_value_that_vllm_refuses_is_one_sentence(case_runner: CaseRunner, config: str, field: str) -> None:
    with pytest.raises(BadSubject, match=rf"^--kv-config: .*\b{field}\b") as raised:
        case_runner.probe(Settings(connector="NixlConnector", config=config))
    assert "\n" not in str(raised.value)


# ---- wrong connectors, by the command ------------------------------------------------------------

ENDS = [
    (
        "MovesNothing",
        "n200 and not all_blocks_are_freed",
        "tokens 0-198 of all 4 layers was never written",
        "2 rules: KV-BYTES-001, KV-OUTPUT-001",
    ),
    (
        "RecomputesQuietly",
        "n200 and not all_blocks_are_freed",
        "get_num_new_matched_tokens announced nothing",
        "the rule KV-HANDOVER-002",
    ),
    (
        "CrashesInLoad",
        "n200",
        "D was killed by SIGSEGV in start_load_kv (failures.py:",
        "the rule KV-HANDOVER-001",
    ),
    ("HangsInLoad", "n200", "s in start_load_kv (failures.py:", "the rule KV-HANDOVER-001"),
    (
        "LeavesProcess",
        "no_threads_ports_or_processes_left",
        "after shutdown P still has 1 processes",
        "the rule KV-SHUTDOWN-001",
    ),
]


@pytest.mark.parametrize(("connector", "cases", "diagnosis", "rules"), ENDS, ids=[end[0] for end in ENDS])
def test_a_wrong_connector_ends_in_a_verdict(
    command: Run, connector: str, cases: str, diagnosis: str, rules: str
) -> None:
    run = command(f"tests.wrong_connectors.engine:{connector}", "-k", cases, "--kv-timeout-scale=0.3")
    assert (run.code, run.word) == (EXIT_CODES["VIOLATES"], "VIOLATES"), run.text
    assert diagnosis in run.text
    assert any(re.fullmatch(rf"VIOLATES: \d cases? breaks? {rules}", line) for line in run.lines), run.text
    _ends_clean(run)


# ---- stopped from outside ------------------------------------------------------------------------


def test_ctrl_c_ends_in_a_verdict(begin: Run) -> None:
    run = begin("tests.wrong_connectors.engine:Right")
    run.wait_for("starting P")
    run.send(signal.SIGINT)
    run.process.wait(STOPPED_S)
    assert (run.code, run.word) == (2, "INCOMPLETE"), run.text
    assert any(
        line.startswith("INCOMPLETE: ") and "that were selected have no result" in line for line in run.lines
    ), run.text
    assert run.left() == []


WHEN = {
    "while vLLM is imported": ("Right", "loading vLLM"),
    "while the connector hangs": ("HangsInLoad", "still in start_load_kv"),
}


@pytest.mark.parametrize("when", WHEN)
def test_a_killed_run_leaves_nothing(begin: Run, when: str) -> None:
    connector, said = WHEN[when]
    run = begin(f"tests.wrong_connectors.engine:{connector}", cold=connector == "Right")
    run.wait_for(said)
    assert len(run.processes()) > 1
    run.send(signal.SIGKILL)
    run.process.wait(5)
    assert run.left() == []


def test_a_killed_run_with_two_workers_leaves_nothing(begin: Run) -> None:
    run = begin("NixlConnector", "-n2", "--kv-family=llama", "--kv-topology=P1D1,P1D2")
    run.wait_for("starting P")
    run.send(signal.SIGKILL)
    run.process.wait(5)
    assert run.left() == []


def test_a_run_whose_background_process_is_killed_does_not_blame_the_connector(begin: Run) -> None:
    run = begin("tests.wrong_connectors.engine:HangsInLoad")
    run.wait_for("still in start_load_kv")
    [pid] = run.temporary.glob("kvconform-*/pid")
    os.kill(int(pid.read_text()), signal.SIGKILL)
    run.process.wait(STOPPED_S)
    assert (run.code, run.word) == (EXIT_CODES["HARNESS"], "HARNESS"), run.text
    assert set(run.outcomes.values()) == {"HARNESS", "PASS"}  # the engines had started
    assert "the zygote (the process that engines are forked from) is gone" in run.text
    assert run.left() == []


@pytest.mark.parametrize(
    ("connector", "topology"), [("LeavesSharedMemory", "P1D1"), ("RaisesInLoad", "P1D2")]
)
def test_shared_memory_goes_with_the_engine(case_runner: CaseRunner, connector: str, topology: str) -> None:
    before = set(os.listdir("/dev/shm"))
    case_runner.run(connector, "llama", topology, variants="n64")
    end = time.monotonic() + LEAVE_S
    while (
        left := of_nobody([f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - before])
    ) and time.monotonic() < end:
        time.sleep(0.05)  # other tests have engines meanwhile, of which some end badly
    assert left == []


def _ends_clean(run: Command) -> None:
    assert "Traceback" not in run.text
    assert run.left() == []
