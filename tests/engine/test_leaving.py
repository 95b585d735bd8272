"""Engines end by vLLM's shutdown, and what the processes of a run leave in /dev/shm goes with them."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.bench import Benches
from pytest_kvconform.rigs.engine import handle
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from pytest_kvconform.verdict import EXIT_CODES
from tests.helpers.case_runner import CONFIG, CaseRunner

from .command import Run

SOON_S = 30.0


def left(master: Path) -> list[str]:
    """Names of halves of engines that are signed on."""
    return sorted(file.name for file in master.iterdir())


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(("connector", "signs_off"), [("SignsOn", True), ("SignsOnAndHangs", False)])
def test_engines_sign_off_while_the_next_cell_starts(
    case_runner: CaseRunner, monkeypatch: pytest.MonkeyPatch, connector: str, signs_off: bool
) -> None:
    monkeypatch.setattr(handle, "LEAVE_S", 60.0 if signs_off else 5.0)
    settings = Settings(
        connector=f"tests.wrong_connectors.engine:{connector}", config=CONFIG, tier=("engine",)
    )
    facts, subject = case_runner.probe(settings), resolve(settings)
    bench = Benches(case_runner.zygote.address, subject, settings, facts, lambda sentence: None)
    master = case_runner.zygote.run_dir / "master"
    bench.engine.engines(Cell("llama", "P1D1"))
    assert len(left(master)) == 4  # both halves of two engines
    engines = {int(name.rpartition("-")[2]) for name in left(master)}
    bench.close()
    assert signs_off or all(map(lives, engines)), "nobody waits until they end, or are killed"
    end = time.monotonic() + SOON_S
    while any(map(lives, engines)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(lives, engines))
    assert len(left(master)) == (0 if signs_off else 4)
    for file in master.iterdir():
        file.unlink()


def test_files_in_shared_memory_go_with_the_run(command: Run) -> None:
    before = set(Path("/dev/shm").glob("segment-of-a-store-*"))  # of the zygote of other tests
    run = command(
        *("tests.wrong_connectors.engine:SignsOn", "-k", "n64"), *("--kv-family=llama", "--kv-topology=P1D1")
    )
    assert set(run.outcomes.values()) == {"PASS"}, run.text  # so engines have started, and made files
    assert set(Path("/dev/shm").glob("segment-of-a-store-*")) <= before


def test_a_process_that_is_killed_is_no_violation_and_ends_the_run(command: Run) -> None:
    run = command("tests.wrong_connectors.engine:KilledInLoad", "--kv-family=llama", "--kv-topology=P1D1")
    assert (run.code, run.word) == (EXIT_CODES["HARNESS"], "HARNESS"), run.text
    assert set(run.outcomes.values()) <= {"HARNESS", "PASS"}
    assert "was killed by SIGKILL, exit code 137, which the suite did not send: most likely the" in run.text
    assert "the engine llama-P1D1-D-" in run.text
    assert not [pid for pid in run.processes() if pid != os.getpid()]


def test_an_engine_that_hangs_in_garbage_collection_says_so(command: Run) -> None:
    for scale in ("0.2", "1"):  # on a busy machine an engine may not start in a fifth of the time
        run = command(
            "tests.wrong_connectors.engine:WaitsWhenCollected",
            *("-k", "no_threads_ports_or_processes_left", f"--kv-timeout-scale={scale}"),
            *("--kv-family=llama", "--kv-topology=P1D1"),
        )
        if run.code == 1:
            break
    assert re.search(r"P did not answer within \d+ s in garbage collection \(threading\.py:\d+\)", run.text)
    assert (run.code, run.word) == (1, "VIOLATES"), run.text
