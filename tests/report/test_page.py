"""The page of a report, and the command and the option that write it.

These tests read the HTML. `ci/report_page.py` opens the page in a browser, and sees what they miss: what the
script does, what it looks like, how soon it is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from pytest_kvconform import cli
from pytest_kvconform.report import document, failure, page
from pytest_kvconform.report.page import contents, transfers
from pytest_kvconform.result import LEVELS, QUESTIONS, CaseResult, Outcome

from .parsed import Page, made, passed

DEEDS = {"arrive(gemma3*": "violate", "window(gemma3-P1D2*": "blocked"}


def drawn(path) -> Page:
    return Page(page.render(document.read(path)))


# ---- what is on it ---------------------------------------------------------------------------------------


def test_the_option_writes_the_page(kv):
    run = kv("--kv-html", deeds=DEEDS)
    file = run.path.with_name("report.html")
    assert file.read_text() == page.render(document.read(run.path))
    assert "kv: page: kv-report/report.html" in run.lines
    assert [one.name for one in sorted(run.path.parent.iterdir())] == ["report.html", "report.json"]


def test_a_page_of_an_earlier_report_does_not_stay(kv):
    file = kv("--kv-html", deeds=DEEDS).path.with_name("report.html")
    assert file.exists()
    kv()
    assert not file.exists()
    file.write_text("<title>of another program</title>")
    kv()
    assert file.exists()


def test_a_page_that_cannot_be_written_changes_no_verdict(kv, pytester):
    (pytester.path / "kv-report" / "report.html").mkdir(parents=True)
    run = kv("--kv-html")
    assert run.code == 0
    assert "kv: kv-report/report.html cannot be written: Is a directory" in run.lines
    assert [one.name for one in run.path.parent.iterdir() if one.name.startswith(".")] == []


def test_levels_come_first_then_cells_then_causes(kv):
    shown = drawn(kv(deeds=DEEDS).path)
    assert shown.texts["h2"] == [
        "Levels",
        "Level, family, topology",
        "Findings by cause",
        "All results",
        "Features",
        "Run",
    ]
    rows = [" ".join(text.split()) for text in shown.texts["tr"]]
    assert rows[1] == "coreCONFORMS 3 PASS 3 cases passed, 2,000 bytes moved and compared"
    assert rows[2] == "hybridVIOLATES 3 FAIL 1 PASS 3 cases break the rule KV-BYTES-001"
    assert [row.startswith(level) for row, level in zip(rows[1:6], LEVELS, strict=True)] == [True] * 5


def test_each_square_names_its_cases_and_leads_to_them(kv):
    report = document.read(kv(deeds=DEEDS).path)
    shown = Page(page.render(report))
    squares = {
        (one["data-family"], one["data-topology"], one["data-level"]): one["class"]
        for one in shown.of("a", "square")
    }
    assert squares == {
        ("llama", "P1D1", "core"): "square w-PASS",
        ("gemma3", "P1D1", "hybrid"): "square w-FAIL",
        ("gemma3", "P1D1", "resilient"): "square w-PASS",
        ("gemma3", "P1D2", "heterogeneous"): "square w-FAIL",
        ("gemma3", "P1D2", "resilient"): "square w-BLOCKED",
    }
    rows = [row for rows in contents.families(report).values() for row in rows]
    assert sum(n for row in rows for one in row.squares if one for _, n in one.counts) == len(report.results)


def test_a_cause_shows_its_first_case_and_the_line_to_run_it_again(kv):
    run = kv(deeds=DEEDS)
    report = document.read(run.path)
    first, second = contents.causes(report, {}, failure.settings_of(report))
    assert (first.cause.outcome, len(first.cause.ids)) == (Outcome.FAIL, 6)
    assert first.ids == [
        "kv::engine/bytes::arrive[gemma3-P1D1-{n16,n63,n95}]",
        "kv::engine/bytes::arrive[gemma3-P1D2-{n16,n63,n95}]",
    ]
    [again] = dict(first.sections)["again"]
    assert again == (
        f"pytest --kv-connector=m:C --kv-declare={run.declared} 'kv::engine/bytes::arrive[gemma3-P1D1-n16]'"
    )
    assert dict(second.sections).keys() == {"reason", "again"}
    shown = Page(page.render(report))
    assert again in shown.texts["pre"]
    assert "layer  5 K  . . . U" in "\n".join(shown.texts["pre"])
    assert "Every byte arrives." in shown.texts["p"]
    assert len(shown.of("details", "cause")) == 2


def test_sentences_of_rules_are_those_of_the_suite_that_wrote_the_report(kv):
    report = document.read(kv(deeds=DEEDS).path)
    assert "Every byte arrives." in page.render(report)
    assert "Every byte arrives." not in page.render(msgspec.structs.replace(report, suite="2026.1"))


def test_every_result_is_in_the_list(kv):
    report = document.read(kv(deeds=DEEDS).path)
    rows = Page(page.render(report)).data["rows"]
    assert [row[:2] for row in rows] == [[one.id, one.outcome.value] for one in report.results]
    by_id = {row[0]: row for row in rows}
    passed = by_id["kv::engine/bytes::arrive[llama-P1D1-n16]"]
    assert passed[2:6] == ["core", "llama", "P1D1", "KV-BYTES-001"]
    assert passed[8:] == [-1, [["evidence", ["1 bytes compared", "1,000 bytes moved"]]]]
    failed = by_id["kv::engine/bytes::arrive[gemma3-P1D2-n63]"]
    assert failed[7:9] == ["KV-BYTES-001: the last window block was never read", 0]
    assert failed[9][-1][0] == "again"


def test_a_report_of_a_suite_without_levels(kv):
    report = document.read(kv(deeds=DEEDS).path)
    results = tuple(msgspec.structs.replace(one, level="") for one in report.results)
    old = msgspec.structs.replace(
        report, results=results, verdict=msgspec.structs.replace(report.verdict, levels=())
    )
    shown = Page(page.render(old))
    assert "Levels" not in shown.texts["h2"]
    assert len(shown.of("a", "square")) == 3


def test_a_run_without_results(kv):
    shown = drawn(kv(deeds={}, bench="", undeclared=True).path)
    assert "VIOLATES" not in shown.texts["title"][0]
    empty = made([], [])
    assert "No case failed, warned or was blocked." in Page(page.render(empty)).texts["p"]


# ---- accuracy and transfers ------------------------------------------------------------------------------


def test_answers_are_shown_question_by_question():
    name = "kv::accuracy/answers::as_many_answers_are_right[llama-P1D1-strict-match]"
    notes = {"right": 3, QUESTIONS: "..-x"}
    report = made([passed(name, "KV-ACC-005", unit="answers", external_tokens=9, notes=notes)])
    [score] = contents.accuracy(report)
    assert score.case == "as many answers are right strict-match"
    assert (score.answers, score.questions, score.notes) == (4, "..-x", [("right", "3")])
    assert "..-x" in Page(page.render(report)).texts["code"]


def test_signs_of_questions():
    from pytest_kvconform.suite.accuracy import answers

    assert answers.SIGNS == {(True, True): ".", (False, True): "-", (True, False): "+", (False, False): "x"}
    assert answers._rows("." * 65) == (f"  question    0  {'.' * 64}", "  question   64  .")


def test_a_transfer_is_plotted_once_however_many_cases_judge_it():
    def one(module: str, case: str, unit: str, moved: int, **notes: Any) -> CaseResult:
        return passed(f"kv::bytes/{module}::{case}", unit=unit, bytes_moved=moved, notes=notes)

    report = made(
        [
            one("pool", "attention_kv_arrives[llama-P1D1.b16-n2]", "rows", 1000, seconds=0.01),
            one("pool", "sliding_window_is_complete[llama-P1D1.b16-n2]", "rows", 1000, seconds=0.01),
            one("pool", "attention_kv_arrives[llama-P1D1.b16-n9]", "rows", 10**6, seconds=1.5),
            one("pool", "attention_kv_arrives[llama-P1D1.b16-n7]", "rows", 0, seconds=1.0),
            one("pool", "attention_kv_arrives[llama-P1D1.b16-n8]", "rows", 5, seconds=0),
            one("blocks", "all_blocks_are_freed[llama-P1D1.b16-n9]", "blocks", 10**6, seconds=0.001),
        ]
    )
    assert [(each.size, each.seconds) for each in transfers.transfers(report)] == [(1000, 0.01), (10**6, 1.5)]
    plot = transfers.plot(report)
    assert plot is not None
    assert plot.summary == "2 transfers of 1 kB to 1 MB, which took 10 ms to 1.5 s"
    assert [tick.label for tick in plot.across] == ["1 kB", "10 kB", "100 kB", "1 MB"]
    assert [tick.label for tick in plot.upward] == ["10 ms", "100 ms", "1 s", "10 s"]
    assert plot.dots[0] == (plot.across[0].at, plot.upward[0].at)
    assert transfers.by_family(report) == [("llama", 2, "1 MB", "755 ms", "1.5 s")]
    assert len(Page(page.render(report)).of("circle")) == 2


@pytest.mark.parametrize("seconds", ["soon", float("inf"), -1])
def test_seconds_that_are_none_are_not_plotted(seconds):
    one = passed("kv::bytes/pool::a[llama-P1D1.b16]", unit="rows", bytes_moved=5, notes={"seconds": seconds})
    assert transfers.plot(made([one])) is None


# ---- the command -----------------------------------------------------------------------------------------


def test_the_command_draws_a_report(kv, capsys, tmp_path):
    path = kv(deeds=DEEDS).path
    capsys.readouterr()
    for arguments, file in (
        ([str(path)], path.with_name("report.html")),
        ([str(path.parent)], path.with_name("report.html")),
        ([str(path), "--output", str(tmp_path / "a" / "b.html")], tmp_path / "a" / "b.html"),
    ):
        assert cli.main(["html", *arguments]) == 0
        assert capsys.readouterr().out == f"{file}\n"
        assert file.read_text() == page.render(document.read(path))
        file.unlink()


def test_what_the_command_cannot_do_is_one_sentence(kv, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(document, "MOST_BYTES", 5_000_000)
    path = kv().path
    (tmp_path / "file").write_text("")
    (tmp_path / "full").symlink_to("/dev/full")
    deep = json.loads(path.read_text()) | {"facts": {"a": []}}
    (tmp_path / "deep.json").write_text(json.dumps(deep).replace("[]}", "[" * 9**5 + "]" * 9**5 + "}", 1))
    capsys.readouterr()
    for arguments, says in (
        (["nowhere.json"], "nowhere.json: No such file or directory"),
        ([str(tmp_path / "deep.json")], "deep.json: it is nested too deeply"),
        (["/dev/zero"], "/dev/zero: it has more than 5000000 bytes, and so is no report"),
        ([str(path), "-o", str(tmp_path / "full")], "full cannot be written: No space left on device"),
        ([str(path), "-o", str(tmp_path)], f"{tmp_path} cannot be written: Is a directory"),
        ([str(path), "-o", str(tmp_path / "file" / "x.html")], "cannot be written"),
    ):
        assert cli.main(["html", *arguments]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1


def test_only_a_page_loads_jinja():
    modules = "pytest_kvconform.cli, pytest_kvconform.pytest_hooks.controller"
    code = f"import sys, {modules}; print('jinja2' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "False\n"
