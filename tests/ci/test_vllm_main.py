"""The nightly run on vLLM's main: its workflow, and the issue that it writes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.fixtures import ROOT

SCRIPT = ROOT / "ci" / "nightly" / "issue.py"
WORKFLOW = ROOT / ".github" / "workflows" / "vllm-main.yml"
# `gh` as a program that notes its words and its input, and knows the open issues
GH = f"""#!{sys.executable}
import os, sys
said = sys.stdin.read() if "-" in sys.argv else ""
open(os.environ["CALLS"], "a").write(repr((sys.argv[1:3], said)) + "\\n")
if sys.argv[2] == "list":
    print(os.environ["OPEN"])
"""
# `kvconform diff`: what it prints, and its exit code
KVCONFORM = """#!/bin/sh
echo "vllm: 0.33.1.dev1 -> 0.33.1.dev2"; seq 1 $CHANGED
echo "$CHANGED of 900 cases changed"; [ "$CHANGED" = 0 ]
"""


class Night:
    def __init__(self, place: Path):
        self.place, self.calls = place, place / "calls"
        for name, text in (("gh", GH), ("kvconform", KVCONFORM)):
            (place / name).write_text(text)
            (place / name).chmod(0o755)

    def report(self, name: str, word: str) -> None:
        (self.place / name).mkdir()
        verdict = {"word": word, "sentence": "900 cases"}
        report = {"verdict": verdict, "environment": {"vllm": "0.33.1.dev2"}}
        (self.place / name / "report.json").write_text(json.dumps(report))

    def run(
        self, changed: int = 0, issues: tuple[str, ...] = (), token: str = "t"
    ) -> tuple[int, str, list[Any]]:
        """Exit code, what is printed, and (words, input) of each call of gh."""
        titles = [{"number": 7 + at, "title": title} for at, title in enumerate(issues)]
        environment = {
            "PATH": f"{self.place}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "OPEN": json.dumps(titles),
            "CHANGED": str(changed),
            "GH_TOKEN": token,
            "RUN_URL": "https://example.org/runs/1",
        }
        self.calls.write_text("")
        command = [
            sys.executable,
            str(SCRIPT),
            "last",
            "tonight",
            "--kvconform",
            str(self.place / "kvconform"),
        ]
        done = subprocess.run(
            command, cwd=self.place, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.stderr == ""
        return done.returncode, done.stdout, [eval(line) for line in self.calls.read_text().splitlines()]


@pytest.fixture
def night(tmp_path: Path) -> Night:
    return Night(tmp_path)


def test_a_green_night_like_the_last_one_writes_nothing(night: Night) -> None:
    night.report("last", "CONFORMS")
    night.report("tonight", "CONFORMS")
    code, said, calls = night.run()
    assert (code, calls) == (0, [])
    assert "0 of 900 cases changed" in said


def test_changed_outcomes_open_one_issue(night: Night) -> None:
    night.report("last", "CONFORMS")
    night.report("tonight", "CONFORMS")
    code, _, [listed, (words, text)] = night.run(changed=2)
    assert (code, listed[0], words) == (0, ["issue", "list"], ["issue", "create"])
    assert "vllm: 0.33.1.dev1 -> 0.33.1.dev2\n1\n2\n2 of 900 cases changed\n```" in text
    assert text.endswith("\n\nhttps://example.org/runs/1")


def test_a_red_night_comments_on_the_issue_that_is_open(night: Night) -> None:
    night.report("last", "VIOLATES")
    night.report("tonight", "VIOLATES")
    title = "vLLM's main: the suite's nightly run"
    code, _, calls = night.run(issues=("another", title))
    assert (code, [words for words, _ in calls]) == (1, [["issue", "list"], ["issue", "comment"]])
    assert "vLLM 0.33.1.dev2: **VIOLATES**. 900 cases" in calls[-1][1]


def test_a_night_without_a_report_is_red_and_the_last_report_stays(night: Night) -> None:
    night.report("last", "CONFORMS")
    code, said, calls = night.run()
    assert (code, calls[-1][0]) == (1, ["issue", "create"])
    assert said.startswith("There is no report of this night: the set-up or pytest failed")
    assert (night.place / "last" / "report.json").exists()


def test_the_first_night_has_nothing_to_compare_with(night: Night) -> None:
    night.report("tonight", "CONFORMS")
    code, said, calls = night.run()
    assert (code, calls) == (0, [])
    assert "no report of the last night" in said
    assert (night.place / "last" / "report.json").read_bytes() == (
        night.place / "tonight" / "report.json"
    ).read_bytes()


def test_a_long_diff_is_cut(night: Night) -> None:
    night.report("last", "CONFORMS")
    night.report("tonight", "CONFORMS")
    _, said, _ = night.run(changed=900)
    assert "and 802 more lines\n900 of 900 cases changed" in said
    assert len(said.splitlines()) < 120


def test_without_a_token_the_text_is_only_printed(night: Night) -> None:
    night.report("tonight", "VIOLATES")
    code, said, calls = night.run(token="")
    assert (code, calls) == (1, [])
    assert "VIOLATES" in said


def test_the_workflow_runs_commands_of_this_repository_and_may_write_issues_alone() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow["permissions"] == {"contents": "read", "issues": "write"}
    steps = workflow["jobs"]["conform"]["steps"]
    runs = [shlex.split(step["run"]) for step in steps if "run" in step]
    assert [run[:2] for run in runs] == [["make", "conform"], ["python", "ci/nightly/issue.py"]]
    assert "VLLM=main" in runs[0]
    [arguments] = [word for word in runs[0] if word.startswith("ARGS=")]
    assert arguments.endswith(f"--kv-report={runs[1][3]}")
    restored, saved = (
        step["with"]["path"] for step in steps if step.get("uses", "").startswith("actions/cache")
    )
    assert restored == saved == runs[1][2]
    assert set(re.findall(r"\bsecrets\.\w+|github\.token", WORKFLOW.read_text())) == {"github.token"}
