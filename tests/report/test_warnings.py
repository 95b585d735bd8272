"""A broken rule of strength SHOULD warns: it is shown and counted, and makes nothing else of the run."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from pytest_kvconform import cli
from tests.small_suite.runs import TODAY, declare

HELLO = "interface/answers::hello[llama-P1D1]"  # checks KV-ANSWER-001, which is a SHOULD
ISSUE = "https://example.org/issues/57"


def verified(run, capsys) -> int:
    capsys.readouterr()
    return cli.main(["verify", str(run.path)])


@pytest.mark.parametrize("arguments", [(), ("-n2",), ("--kv-claim",), ("-x",)])
def test_a_warning_is_shown_and_counted(kv, capsys, arguments):
    run = kv(*arguments, deeds={"hello(llama*": "violate"})
    assert (run.code, run.word, run.outcomes[HELLO]) == (0, "CONFORMS", "WARNING")
    assert sum(outcome == "PASS" for outcome in run.outcomes.values()) == 12
    assert any(line.startswith("CONFORMS, with 1 warning: 12 cases passed, ") for line in run.lines)
    assert "1 warning, 1 cause:" in run.lines
    assert "  1 × the last window block was never read (KV-ANSWER-001)" in run.lines
    assert any("BROKEN SHOULD RULES" in line for line in run.lines)
    assert "           KV-ANSWER-001 SHOULD, since vLLM 0.9" in run.lines
    assert any(line.startswith("again      pytest --kv-connector=m:C") for line in run.lines)
    assert "12 passed, 1 warned" in run.lines[-1]
    assert run.report["verdict"]["counts"] == {"PASS": 12, "WARNING": 1}
    [result] = [one for one in run.report["results"] if one["id"].endswith(HELLO)]
    assert (result["case_outcome"], result["finding"]["rule"]) == ("FAIL", "KV-ANSWER-001")
    assert verified(run, capsys) == 0


def test_one_cause_is_written_once(kv):
    run = kv(deeds={"hello*": "violate"})
    assert any(line.startswith("CONFORMS, with 3 warnings: ") for line in run.lines)
    assert "3 warnings, 1 cause:" in run.lines
    assert sum(line.startswith("rule ") for line in run.lines) == 1
    assert any(f"kv::{HELLO.replace('llama', 'gemma3')} and 2 more" in line for line in run.lines)


def test_a_warning_hides_no_violation(kv):
    run = kv(deeds={"hello*": "violate", "window*P1D1*": "violate"})
    assert (run.code, run.word) == (1, "VIOLATES")
    assert "VIOLATES, with 3 warnings: 1 case breaks the rule KV-BYTES-002" in run.lines


def test_the_rule_of_the_finding_decides(kv):
    """A case of a SHOULD may find that another rule is broken, which is a MUST."""
    run = kv(deeds={"hello(llama*": "violate", "arrive(llama-P1D1-n16*": "violate"})
    assert run.outcomes["engine/bytes::arrive[llama-P1D1-n16]"] == "FAIL"


def test_nothing_but_warnings_is_not_green(kv):
    run = kv("kv::interface", deeds={"*": "violate"})
    assert (run.code, run.word) == (10, "INCOMPLETE")


def test_a_row_of_a_feature_does_not_fail_by_a_warning(kv):
    run = kv(deeds={"hello*": "violate"})
    rows = {row["name"]: row["observed"] for row in run.report["verdict"]["features"]}
    assert (rows["full-attention"], rows["sliding-window"]) == ("works", "works")


def test_a_known_warning_stays_a_warning(kv, pytester, capsys):
    entry = f'[[known]]\ncase = "kv::{HELLO}"\nissue = "{ISSUE}"\nreason = "slow"\nexpires = {TODAY}\n'
    declare(pytester.path / "known.toml", {}, entry)
    for more in ((), ("--kv-claim",)):
        arguments = ("--kv-declare=known.toml", *more)
        run = kv(*arguments, undeclared=True, deeds={"hello(llama*": "violate"})
        assert (run.code, run.word, run.outcomes[HELLO]) == (0, "CONFORMS", "WARNING")
        assert f"known      slow ({ISSUE}, until {TODAY})" in run.lines
        assert verified(run, capsys) == 0
    run = kv("--kv-declare=known.toml", undeclared=True)
    assert (run.code, run.word) == (10, "INCOMPLETE")  # it no longer fails


def test_junit_and_the_page_of_a_ci_job(kv, pytester, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "page.md"))
    kv("--junitxml=junit.xml", deeds={"hello(llama*": "violate"})
    suite = ET.parse(pytester.path / "junit.xml").getroot()[0]
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("0", "0", "1")
    [skipped] = [case.find("skipped") for case in suite if case.find("skipped") is not None]
    assert skipped.get("message") == "KV-ANSWER-001: the last window block was never read"
    page = (pytester.path / "page.md").read_text()
    assert "**CONFORMS, with 1 warning**: 12 cases passed" in page
    assert "| WARNING | 1 | the last window block was never read | KV-ANSWER-001 |" in page


def test_verify_and_diff(kv, pytester, capsys):
    before = kv().path.rename(pytester.path / "before.json")
    after = kv(deeds={"hello(llama*": "violate"}).path
    capsys.readouterr()
    assert cli.main(["diff", str(before), str(after)]) == 1
    assert f"kv::{HELLO}  PASS -> WARNING" in capsys.readouterr().out
    raw = json.loads(after.read_text())
    raw["should"] = []
    after.write_text(json.dumps(raw))
    assert cli.main(["verify", str(after)]) == 1
    said = capsys.readouterr().out
    assert "should: the rules of strength SHOULD are not those of the suite" in said
    assert f"kv::{HELLO} is WARNING in the report, but the declaration makes it FAIL" in said


def test_what_was_not_applicable_is_counted_by_tier(kv):
    run = kv(unsupported={"tp-heterogeneous": "one size only"}, deeds={"*P1D2*": "refuse"})
    line = "not applicable: interface 1 of 3, engine 4 of 10 (unsupported: tp-heterogeneous)"
    assert line in run.lines
    assert not any(line.startswith("not applicable") for line in kv().lines)
