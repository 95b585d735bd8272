"""Two workers, or another order of cases, give the same verdict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import conftest

DEEDS = {"arrive(gemma3*": "violate", "hello(llama*": "blocked", "window*P1D2*": "assert"}


def verdict_of(run):
    return run.report["verdict"], run.outcomes


def test_workers_and_order_change_nothing(kv):
    plain = kv(deeds=DEEDS)
    assert plain.word == "HARNESS"
    for arguments in (["-n2"], ["--kv-seed=5"], ["-n2", "--kv-seed=5"]):
        run = kv(*arguments, deeds=DEEDS)
        assert verdict_of(run) == verdict_of(plain)
        assert run.code == plain.code == 11


def test_shuffled_by_a_plugin(kv):
    run, plain = kv("-v", "-p", "shuffles", deeds=DEEDS), kv("-v", deeds=DEEDS)
    assert verdict_of(run) == verdict_of(plain)
    assert run.ran != plain.ran
    assert len(run.cells) == 3


def test_a_cell_belongs_to_one_worker_and_its_progress_is_seen(kv):
    run = kv("-n2")
    assert (run.code, run.word) == (0, "CONFORMS")
    assert sorted(run.cells) == ["gemma3-P1D1", "gemma3-P1D2", "llama-P1D1"]
    assert len({line.split()[0] for line in run.log if " starts " in line}) == 2
    for cell in run.cells:
        assert sum(line == f"kv: {cell}: starting P (TP 1) and D (TP {cell[-1]})" for line in run.lines) == 1
    assert run.log[-1] == "zygote closed"
    assert sum(line.startswith("bench closed") for line in run.log) == 2


def test_another_distribution_is_respected(kv):
    run = kv("-n2", "--dist=each")
    assert len(run.report["results"]) == 26


def test_selection_settings_and_config_reach_the_workers(kv):
    run = kv("-n2", "kv::engine/bytes::window", "--kv-device=cpu", "--kv-seed=9", "--kv-timeout-scale=3")
    assert list(run.outcomes) == ["engine/bytes::window[gemma3-P1D1]", "engine/bytes::window[gemma3-P1D2]"]
    assert "selection: 2 of 13" in run.lines
    assert "bench device cpu seed 9 timeout-scale 3.0" in run.log


@pytest.mark.parametrize(
    ("bench", "code", "says"),
    [
        ("no vllm", 10, "vLLM is not installed"),
        ("harness", 11, "the zygote died"),
        ("no start", 11, "did not start"),
        ("no engine", 11, "the engine did not start"),
        ("leftover", 11, "process 17 would not end"),
        ("bench will not close", 11, "closing the engines failed"),
        ("bad subject", 4, "module nothing_there cannot be imported"),
    ],
)
def test_a_bench_that_fails(kv, bench, code, says):
    run = kv("-n2", bench=bench)
    assert run.code == code
    assert says in run.text
    assert bench == "no start" or run.log[-1] == "zygote closed"


@pytest.mark.parametrize(
    ("deed", "how"), [("die", "left with exit code 3"), ("be killed", "was killed by SIGKILL, most likely")]
)
def test_a_lost_worker_ends_the_run(kv, deed, how):
    run = kv("-n2", deeds={"window(gemma3-P1D2*": deed})
    assert (run.code, run.word) == (11, "HARNESS")
    assert "engine/bytes::window[gemma3-P1D2]" not in run.outcomes
    [sentence] = run.report["troubles"]
    assert re.match(rf"worker gw\d of pytest-xdist {how}.*, and the run ends$", sentence)
    assert run.log[-1] == "zygote closed"


def test_a_worker_whose_forks_hold_its_pipe_is_missed(pytester):
    """xdist alone waits for ever: it takes the pipe's end for the worker's end."""
    pytester.makeconftest(Path(conftest.__file__).read_text().replace("pytest_plugins", "_"))
    pytester.makepyfile(
        test_a="""
            import os, signal, time
            def test_forks():
                if os.fork() == 0:
                    time.sleep(1000)
                os.kill(os.getpid(), signal.SIGKILL)
            def test_later(): pass""",
        test_b="def test_passes(): pass",
    )
    run = pytester.runpytest_subprocess("-n2", "--dist=loadfile", "-p", "no:cacheprovider", timeout=60)
    assert run.ret == 11
    run.stdout.re_match_lines(
        [".*worker gw. of pytest-xdist was killed by SIGKILL, most likely.* the run ends.*"]
    )


def test_stopping_at_the_first_failure_keeps_the_verdicts_code(kv):
    run = kv("-n2", "-x", deeds={"*": "violate"})
    assert (run.code, run.word) == (1, "VIOLATES")


def test_a_failing_test_of_the_user_that_ends_the_run_is_no_success(kv, pytester):
    pytester.makepyfile(test_user="import time\ndef test_user():\n    time.sleep(3)\n    assert False")
    run = kv("-n2", "-x", ".", "kv::")
    assert run.code == 2, run.text
    assert "1 failed" in run.text
