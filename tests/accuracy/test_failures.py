"""What goes wrong and is not the connector's doing: one clear sentence, the right outcome, nothing left."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pytest_kvconform import extras
from pytest_kvconform.result import Blocked, Cell, NotApplicable
from pytest_kvconform.rigs.context import RunningEngines
from pytest_kvconform.rigs.serving import bench, chain, data, evaluator, preload, record, server
from pytest_kvconform.rigs.serving.messages import Answer, Answers, Questions
from pytest_kvconform.rigs.serving.metrics import Counters
from pytest_kvconform.rigs.serving.observation import Look, Runs
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from tests.engine.command import Command
from tests.helpers.case_runner import CellRun

Run = Callable[..., CellRun]
ANSWERED = "every_question_is_answered"
NOTHING_ASKED = Questions(task="", data="", count=0, longest_answer=0)


def test_a_router_that_dies_in_the_middle_is_no_violation(
    run_cases: Run, questions: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions(16)
    chains, start = list[chain.Chain](), chain.start

    def started(*args: Any, **more: Any) -> chain.Chain:
        chains.append(start(*args, **more))
        return chains[-1]

    answered = evaluator.Progress.answered

    def kill_router(self: Any, count: int, total: int, what: str) -> None:
        answered(self, count, total, what)
        if what == bench.SUBJECT and count == 3:
            os.kill(chains[0].processes[-1].process.pid, signal.SIGTERM)

    monkeypatch.setattr(chain, "start", started)
    monkeypatch.setattr(evaluator.Progress, "answered", kill_router)
    run = run_cases("Right")
    assert set(run.outcomes.values()) == {"HARNESS", "NOT-APPLICABLE"}
    assert run.reasons[ANSWERED] == "the router ended, and no code of the connector runs in it"


def test_a_port_that_is_taken_is_named(
    run_cases: Run, questions: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions(16)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(chain, "free_port", lambda: port)
        run = run_cases("Right")
    assert set(run.outcomes.values()) == {"HARNESS", "NOT-APPLICABLE"}
    assert f"port {port} of this machine was taken by another process" in run.reasons[ANSWERED]


def test_a_full_disk_is_no_violation(
    run_cases: Run, questions: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions(16)
    spec = chain.server_spec
    monkeypatch.setattr(
        chain, "server_spec", lambda *args: msgspec.structs.replace(spec(*args), records="/dev/full")
    )
    monkeypatch.setattr(server.Server, "prompts", lambda self: ())  # reading /dev/full has no end
    run = run_cases("Right")
    assert run.outcomes[ANSWERED] == "HARNESS"
    assert set(run.outcomes.values()) <= {"HARNESS", "NOT-APPLICABLE"}
    assert "No space left on device" in run.reasons[ANSWERED]


def test_a_file_of_records_that_is_torn_is_named(
    run_cases: Run, questions: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions(16)
    monkeypatch.setattr(server, "Prompt", int)  # no line is one
    run = run_cases("Right")
    assert run.outcomes[ANSWERED] == "HARNESS"
    assert "which the server D writes, is torn" in run.reasons[ANSWERED]


def test_what_the_machine_refuses_is_said_once_and_servers_are_not_started_again(
    run_cases: Run, questions: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions(16)
    asked = []

    def full(*args: Any) -> Path:
        asked.append(args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(data, "write_task", full)
    run = run_cases("Right")
    assert run.reasons[ANSWERED] == (
        "this machine keeps the servers from being asked: No space left on device"
    )
    assert len(asked) == 1


@pytest.fixture
def gsm8k(tmp_path: Path) -> Iterator[Path]:
    """A folder of questions whose last line is cut off."""
    for name in ("test", "train"):
        line = b'{"question": "How many?", "answer": "1 + 1 = 2.\\n#### 2"}\n'
        (tmp_path / f"{name}.jsonl").write_bytes(40 * line + line[:20])
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_a_truncated_file_of_questions_is_named_with_its_line(run_cases: Run, gsm8k: Path) -> None:
    run = run_cases("Right", declared={"gsm8k": str(gsm8k)})
    assert set(run.outcomes.values()) == {"BLOCKED", "NOT-APPLICABLE"}
    assert f"--kv-gsm8k: {gsm8k / 'test.jsonl'}, line 41:" in run.reasons[ANSWERED]


def test_a_folder_without_questions_is_named(run_cases: Run, tmp_path: Path) -> None:
    run = run_cases("Right", declared={"gsm8k": str(tmp_path)})
    assert set(run.outcomes.values()) == {"BLOCKED", "NOT-APPLICABLE"}
    assert f"--kv-gsm8k: cannot read {tmp_path / 'test.jsonl'}: No such file" in run.reasons[ANSWERED]


@pytest.mark.parametrize("module", extras.PACKAGES)
def test_a_package_that_is_not_installed_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Blocked, match=r"needs .*: pip install 'pytest-kvconform\[accuracy\]'$"):
        server.require_packages(module)


@pytest.mark.parametrize(
    ("reason", "missing"),
    [
        ("ValueError: blocks of 16 tokens are not supported", 0),
        ("ModuleNotFoundError: No module named 'fast_copy'", 1),
        ("", 1),  # vLLM does not tell: the last exception
    ],
)
def test_an_exception_that_a_start_survived_excuses_nothing(reason: str, missing: int) -> None:
    lacks = ["ImportError: flash_attn is not installed", "ModuleNotFoundError: No module named 'fast_copy'"]
    process = SimpleNamespace(
        reason_of_start=lambda: reason,
        exceptions=lambda since: (lacks[0], reason, lacks[1]),
        last_lines=lambda: (),
        end=lambda gone: 1 << 8,
        log=Path("log"),
    )
    context = SimpleNamespace(
        subject=resolve(Settings(connector="m:C")), missing=list[str](), require_nothing_missing=lambda: None
    )
    one: Any = object.__new__(server.Server)
    one.context, one.process, one.role, one.started = context, process, "server D", False
    one.spec, one.port = SimpleNamespace(kv_transfer_config={}, environment={}), 0
    failed = one.failure("refused")
    assert failed.sentence == f"the server D did not start: {reason or lacks[1]}"
    assert len(context.missing) == missing
    assert all("the package fast_copy is not installed" in sentence for sentence in context.missing)


def test_nothing_is_left_when_the_runner_is_killed(tmp_path: Path) -> None:
    run = Command(tmp_path, "--kv-connector=NixlConnector", "--kv-tier=accuracy", "--kv-family=llama")
    try:
        run.wait_for("questions answered by the subject", 120)
        run.send(signal.SIGKILL)
        run.process.wait(10)
        assert run.left() == []
    finally:
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(run.temporary, ignore_errors=True)


def test_engines_of_the_same_cell_end_before_servers_start() -> None:
    """Both would not fit into the memory of a small machine."""
    cell, running, ended = Cell("llama", "P1D1"), RunningEngines(), list[str]()
    running.make_room(cell)
    running.register(lambda: ended.append("engines"))

    def progress(sentence: str) -> None:
        raise InterruptedError(sentence)

    subject = resolve(Settings(connector="NixlConnector"))
    context = SimpleNamespace(subject=subject, settings=Settings(), running=running, progress=progress)
    with pytest.raises(InterruptedError, match="starting the servers"):
        chain.start(context, cell, data.Exam(Path(), 100, NOTHING_ASKED))  # type: ignore[arg-type]
    assert ended == ["engines"]


def test_a_handover_that_no_router_knows_is_not_applicable() -> None:
    subject = resolve(Settings(connector="NixlConnector", handover="rendezvous"))
    with pytest.raises(NotApplicable, match="vllm-router does not know the hand-over 'rendezvous'"):
        chain.router_word(SimpleNamespace(subject=subject))  # type: ignore[arg-type]


def test_what_does_not_load_blocks_the_accuracy_tier_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> None:
        raise RuntimeError("this build has no server")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(preload, "_import_server", load)
    monkeypatch.setattr(preload, "_import_lm_eval", lambda: None)
    monkeypatch.setattr(preload, "OFFLINE", {})
    address = str(tmp_path / "zygote")
    assert preload.why_not_imported(address) == ""
    preload.preload()
    assert preload.why_not_imported(address) == (
        "vLLM's OpenAI-compatible server does not load here: RuntimeError: this build has no server"
    )


def test_answers_of_an_earlier_run_are_removed_and_new_ones_appear_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, one = Cell("llama", "P1D1"), Answers(answers=(Answer(0, "#### 2", True, True),))
    nothing = Counters(external=0, local=0, computed=0)
    runs = Runs((Look(one, (one, one), nothing, (nothing, nothing)),), 16)
    file = record.write_answers(runs, tmp_path, cell)
    assert [path.name for path in tmp_path.iterdir()] == ["answers-llama-P1D1.jsonl"]
    before = file.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *args: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        record.write_answers(runs, tmp_path, cell)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]
    record.remove_answers(tmp_path, cell)
    assert not list(tmp_path.iterdir())


def test_the_estimate_of_the_end_is_of_all_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = [0.0], list[str]()
    monkeypatch.setattr(evaluator, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    context = SimpleNamespace(progress=said.append)
    progress = evaluator.Progress(context, 3, 8)  # type: ignore[arg-type]
    for look in range(2):
        for _ in range(3):
            for count in range(1, 11):
                clock[0] += 1.0
                progress.answered(count, 10, "the subject")
            progress.end_of_run()
        progress.end_of_look()
        assert progress.done == 30 * (look + 1)
    assert "1 of 10 questions answered by the subject, about 29 s left" in said[0]
    assert "6 of 10 questions answered by the subject, about 24 s left" in said[1]
    assert "look 2 of at most 8, at most 209 s left" in said[6]
