"""Ten defects that well-known conformance suites have or had, each with a test that this one does not have it.

1. Nothing matched, and the run was a success.
2. A configuration that does not load, or a report that cannot be written, ended with exit code 0.
3. A skip weighed less than a pass.
4. JUnit cases had a status and no failure.
5. A word was written that could not be read back.
6. An option did nothing.
7. The order of a report was that of a hash table.
8. A check could not fail.
9. The subject compared for itself, and its exit code was 0.
10. An exception of the subject became a skip.
"""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ET

import msgspec
import pytest

from pytest_kvconform import cli
from pytest_kvconform.report import document
from pytest_kvconform.result import CaseResult, Outcome
from pytest_kvconform.settings import OPTIONS
from pytest_kvconform.verdict import EXIT_CODES, decide_verdict
from tests.report.test_verdict import result

from .test_selection import collect


@pytest.mark.parametrize(
    "arguments",
    [
        ("-k", "no_such_case"),
        ("--kv-feature=mla",),
        ("--deselect", "kv::interface", "-k", "hello"),
        ("-m", "x"),
    ],
)
def test_1_nothing_ran_is_not_a_success(kv, pytester, arguments):
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\nmarkers = ['x']")
    run = kv(*arguments)
    assert (run.code, run.word, run.outcomes) == (10, "INCOMPLETE", {})
    assert "none was selected" in run.text


@pytest.mark.parametrize(
    ("arguments", "bench", "file", "code"),
    [
        (["--kv-config=nowhere.json"], "", "", 4),
        (["--kv-declare=nowhere.toml"], "", "", 4),
        ([], "", "kv-report", 11),
        ([], "no start", "", 11),
        ([], "bug", "", 11),
        ([], "leftover", "", 11),
    ],
)
def test_2_what_does_not_load_or_is_not_written_has_an_exit_code(kv, pytester, arguments, bench, file, code):
    if file:
        pytester.makefile("", **{file: "a file is in the way"})
    assert kv(*arguments, bench=bench).code == code


def test_2_a_command_that_fails_has_an_exit_code(kv, pytester, capsys):
    path = kv().path
    assert [
        cli.main([*words])
        for words in (["verify", "nowhere"], ["diff", "nowhere", str(path)], ["explain", "KV-NO-001"])
    ] == [2, 2, 2]
    report = json.loads(path.read_text())
    report["verdict"]["exit_code"] = 1
    path.write_text(json.dumps(report))
    assert cli.main(["verify", str(path)]) == 1


@pytest.mark.parametrize("worse", ["BLOCKED", "FAIL", "HARNESS"])
def test_3_what_could_not_run_outranks_any_number_of_passes(worse):
    verdict = decide_verdict([*(result(Outcome.PASS) for _ in range(100)), result(Outcome(worse))])
    assert verdict.exit_code == {"BLOCKED": 10, "FAIL": 1, "HARNESS": 11}[worse]


def test_3_nothing_but_declined_and_known_is_no_success():
    for size in (1, 2):
        for outcomes in itertools.combinations([Outcome.NOT_APPLICABLE, Outcome.KNOWN], size):
            assert decide_verdict([result(outcome) for outcome in outcomes]).word == "INCOMPLETE"


@pytest.mark.parametrize("arguments", [(), ("-n2",)], ids=["one", "n2"])
def test_4_junit_as_a_reader_of_junit_sees_it(kv, pytester, arguments):
    """Counted as Jenkins and GitLab do: by the children of a case, not by attributes."""
    deeds = {
        "hello(llama*": "blocked",
        "arrive(llama*n16*": "violate",
        "arrive(llama*n63*": "harness",
        "hello(gemma3-P1D1*": "refuse",
    }
    run = kv("--junitxml=junit.xml", *arguments, deeds=deeds)
    seen = {"failure": set(), "error": set(), "skipped": set(), "": set()}
    suites = ET.parse(pytester.path / "junit.xml").getroot()
    for case in suites.iter("testcase"):
        [kind] = [child.tag for child in case if child.tag in seen] or [""]
        seen[kind].add(case.get("name"))
    by_outcome = {
        outcome: {name.rpartition("::")[2] for name, word in run.outcomes.items() if word == outcome}
        for outcome in Outcome
    }
    assert seen["failure"] == by_outcome["FAIL"] == {"arrive[llama-P1D1-n16]", "hello[gemma3-P1D1]"}
    assert seen["error"] == by_outcome["HARNESS"] == {"arrive[llama-P1D1-n63]"}
    assert seen["skipped"] == by_outcome["BLOCKED"] == {"hello[llama-P1D1]"}
    assert seen[""] == by_outcome["PASS"]


def test_5_every_word_that_is_written_is_read_back(kv):
    for outcome in Outcome:
        one = msgspec.json.decode(msgspec.json.encode(result(outcome)), type=CaseResult)
        assert one.outcome is outcome
    for deeds in ({}, {"*n16*": "violate"}, {"*n63*": "blocked"}, {"*n63*": "assert"}):
        path = kv(deeds=deeds).path
        report = document.read(path)
        assert report.verdict.word in EXIT_CODES
        assert document.encode(report) == path.read_bytes()
        assert document.inconsistencies(report) == []


DOES = {  # option -> arguments that must change something, and what is then different
    "connector": (["--kv-connector=n:D"], lambda run: run.report["subject"]["spec"]),
    "config": (['--kv-config={"kv_port": 7}'], lambda run: run.report["subject"]["config"]),
    "declare": (["--kv-declare=other.toml"], lambda run: run.report["subject"]["features"]),
    "tier": (["--kv-tier=engine"], lambda run: sorted(run.outcomes)),
    "family": (["--kv-family=llama"], lambda run: sorted(run.outcomes)),
    "topology": (["--kv-topology=P1D2"], lambda run: sorted(run.outcomes)),
    "rule": (["--kv-rule=KV-BYTES-002"], lambda run: sorted(run.outcomes)),
    "feature": (["--kv-feature=sliding-window"], lambda run: sorted(run.outcomes)),
    "matrix": (["--kv-matrix=full"], lambda run: sorted(run.outcomes)),
    "device": (["--kv-device=cpu"], lambda run: run.log),
    "timeout_scale": (["--kv-timeout-scale=3"], lambda run: run.log),
    "seed": (["--kv-seed=7"], lambda run: run.ran),
    "report": (
        ["--kv-report=elsewhere"],
        lambda run: [line for line in run.lines if line.startswith("report: ")],
    ),
    "claim": (["--kv-claim", "--kv-family=llama"], lambda run: run.code),
}


@pytest.mark.parametrize("option", [option.name for option in OPTIONS if option.flag])
def test_6_every_option_does_something(kv, pytester, option):
    (pytester.path / "other.toml").write_text("[features]\nmla = true")
    arguments, look = DOES[option]
    without = arguments[1:]
    assert look(kv("-v", *without)) != look(kv("-v", *arguments))


def test_6_stopping_at_the_first_failure_stops(kv):
    assert len(kv("-x", deeds={"*": "violate"}).outcomes) == 1


def test_7_two_reports_are_the_same_to_the_byte(kv, monkeypatch):
    texts = []
    for seed in ("0", "1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        run = kv(
            *(["-p", "shuffles"] if seed == "2" else []),
            deeds={"arrive(gemma3*": "violate", "hello(llama*": "blocked"},
            apart=True,
        )
        texts.append(re.sub(rb'"seconds": [0-9.e-]+', b"", run.path.read_bytes()))
    assert texts[0] == texts[1] == texts[2]


def test_8_a_case_that_cannot_fail_is_found(kv):
    """No case passes without evidence; and a pass is not where a case begins."""
    for deed in ("none", "nothing looked at"):
        run = kv(deeds={"window*": deed})
        assert (run.code, run.word) == (11, "HARNESS")
    assert kv(deeds={"*": "moves nothing"}).word == "INCOMPLETE"


def test_9_a_process_that_dies_is_no_success(kv):
    run = kv("-n2", deeds={"window(gemma3-P1D2*": "die"})
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert "have no result" in run.text


def test_9_the_verdict_is_recomputed_from_the_results(kv, capsys):
    """What the subject, or anybody, writes into a report as its verdict does not count."""
    path = kv(deeds={"window*": "violate"}).path
    for change in (
        lambda report: report["verdict"].update(word="CONFORMS", exit_code=0),
        lambda report: [
            one.update(outcome="NOT-APPLICABLE") for one in report["results"] if one["outcome"] == "FAIL"
        ],
        lambda report: [
            one.update(outcome="KNOWN", case_outcome="FAIL")
            for one in report["results"]
            if one["outcome"] == "FAIL"
        ],
        lambda report: report.update(results=[one for one in report["results"] if one["outcome"] == "PASS"]),
        lambda report: report["selection"].update(
            manifest=(ids := [one["id"] for one in report["results"] if one["outcome"] == "PASS"]),
            selected=ids,
        ),
        lambda report: report["subject"]["features"].pop("mla"),
    ):
        report = json.loads(path.read_text())
        change(report)
        changed = path.with_name("changed.json")
        changed.write_text(json.dumps(report))
        assert cli.main(["verify", str(changed)]) == 1


@pytest.mark.parametrize("deed", ["assert", "skip"])
def test_10_an_exception_is_never_a_skip(kv, deed):
    run = kv(deeds={"window(gemma3-P1D1*": deed})
    assert run.code == 11
    assert run.outcomes["engine/bytes::window[gemma3-P1D1]"] == "HARNESS"


def test_10_only_a_declaration_made_before_the_run_makes_a_case_not_applicable(kv):
    refused = {"*P1D2*": "refuse"}
    assert set(kv(deeds=refused).outcomes.values()) == {"PASS", "FAIL"}
    declared = kv(deeds=refused, unsupported={"tp-heterogeneous": "why"})
    assert set(declared.outcomes.values()) == {"PASS", "NOT-APPLICABLE"}
    assert {word for name, word in declared.outcomes.items() if "P1D2" not in name} == {"PASS"}


def test_10_nothing_of_pytests_makes_a_failure_milder(kv, pytester):
    pytester.makeconftest(
        "import pytest\ndef pytest_collection_modifyitems(items):\n  for item in items: item.add_marker(pytest.mark.xfail(strict=False))"
    )
    run = kv(deeds={"window*": "violate"})
    assert (run.code, run.word) == (1, "VIOLATES")
    assert collect(kv)  # the conftest was read, and cases are still there
