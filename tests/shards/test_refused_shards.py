"""`kvconform merge` takes the shards of one run alone: a sentence says why it refuses others.

The reports are written here, one case each.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_kvconform import cli
from pytest_kvconform.declaration import KnownFailure, today
from pytest_kvconform.report import consistency, document
from pytest_kvconform.result import CaseResult, Evidence, Outcome
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import Subject
from tests.report.test_verify import seal

IDS = [f"kv::engine/bytes::arrive[llama-P1D1-n{number}]" for number in (1, 2, 3)]
KNOWN = KnownFailure(
    case="kv::x", issue="https://example.org/1", reason="lost", expires="2999-01-01", day=today()
)


def write(folder: str, shard: str = "", *, known: tuple[KnownFailure, ...] = (), **settings: Any) -> Path:
    """Write the report of a shard: its case is that of its number. Without a shard it has all cases."""
    mine = [IDS[int(shard[0]) - 1]] if shard else IDS
    results = [
        CaseResult(
            id=name,
            rule="KV-BYTES-001",
            outcome=Outcome.PASS,
            evidence=Evidence(looked_at=1, unit="bytes", bytes_moved=1),
        )
        for name in mine
    ]
    report = document.make_report(
        Settings(connector="m:C", shard=shard, declare="d.toml", **settings),
        Subject(spec="m:C", connector="C", module="m", known=known),
        {"name": "C", "file": f"/{folder}/m.py", "layout": "HND"},
        results,
        mine,
        IDS,
        (),
        elsewhere=sorted({*IDS} - {*mine}),
    )
    document.write(report, Path(folder))
    return Path(folder)


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of three shards of one run, each with the connector in another file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return [write(f"part{number}", f"{number}/3") for number in (1, 2, 3)]


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a report, with its digest."""
    path = folder / "report.json"
    report = json.loads(path.read_bytes())
    change(report)
    seal(path, report)


def merge(*folders: Path) -> int:
    return cli.main(["merge", *map(str, folders), "--report=merged"])


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refused(*folders): the sentence; nothing is written."""

    def run(*folders: Path) -> str:
        assert merge(*folders) == 2
        assert not Path("merged").exists()
        said = capsys.readouterr()
        [line] = said.err.splitlines()
        assert said.out == ""
        return line.removeprefix("kvconform: ")

    return run


def test_the_shards_of_one_run_are_taken_in_any_order(parts, capsys):
    """The verdict is INCOMPLETE, because these shards declare no feature."""
    assert merge(*reversed(parts)) == 10
    assert "features are not declared" in capsys.readouterr().out
    assert consistency.inconsistencies(document.read(Path("merged"))) == []
    assert document.read(Path("merged")).selection.selected == tuple(sorted(IDS))


def test_the_page_of_a_ci_job_gets_the_verdict(parts, monkeypatch, tmp_path):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    merge(*parts)
    assert "**INCOMPLETE**: " in (tmp_path / "summary.md").read_text()


def test_a_shard_that_was_stopped_leaves_the_run_incomplete(parts, capsys):
    report = document.read(parts[1])
    report = msgspec.structs.replace(report, results=())
    document.write(msgspec.structs.replace(report, verdict=document.recompute_verdict(report)), parts[1])
    assert merge(*parts) == 10
    assert f"1 of 3 cases that were selected have no result, the first is {IDS[1]}" in capsys.readouterr().out


def test_a_missing_shard(parts, refused):
    one, two, three = parts
    assert refused(one, three) == "shard 2/3 is missing: give all 3"
    assert refused(two) == "shards 1/3, 3/3 are missing: give all 3"


def test_a_shard_twice(parts, refused):
    assert refused(*parts, parts[1]) == "shard 2/3 is there twice: part2 and part2"


def test_shards_of_two_divisions(parts, refused):
    said = refused(parts[0], parts[1], write("half", "2/2"))
    assert said == "part1 is shard 1/3, and half is shard 2/2: give the shards of one division"


def test_a_whole_run_is_no_shard(parts, refused):
    assert refused(*parts[:2], write("all")) == "all is no shard: its run had no --kv-shard"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"family": ("gemma3",)}, "setting family is [] in one and ['gemma3'] in the other"),
        ({"matrix": "full"}, "setting matrix is 'quick' in one and 'full' in the other"),
        ({"timeout_scale": 2.0}, "setting timeout-scale is 1.0 in one and 2.0 in the other"),
        ({"claim": True}, "setting claim is False in one and True in the other"),
    ],
    ids=str,
)
def test_shards_of_other_settings(parts, refused, settings, says):
    assert refused(*parts[:2], write("other", "3/3", **settings)) == (
        f"part1 and other are not of one run: {says}"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda report: report.update(suite="2026.1"), "the suite is 2026.1 in one"),
        (lambda report: report["environment"].update(vllm="0.33.0"), "vllm is '0.33.0' in one"),
        (lambda report: report["facts"].update(layout="NHD"), "facts.layout is 'NHD' in one"),
        (lambda report: report["subject"].update(profile="store"), "subject.profile is 'store' in one"),
        (lambda report: report["selection"]["manifest"].append("kv::z"), "selection.manifest differs"),
        (lambda report: report.update(should=["KV-X-001"]), "the rules of strength SHOULD differ"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_shards_of_other_machines_and_subjects(parts, refused, change, says):
    def changed(report: dict[str, Any]) -> None:
        change(report)
        report["selection"]["elsewhere"] += {*report["selection"]["manifest"]} - {*IDS}

    edit(parts[0], changed)
    assert refused(*parts).startswith(f"part1 and part2 are not of one run: {says}")


def test_a_shard_that_was_edited(parts, refused):
    edit(parts[0], lambda report: report["results"].clear())
    assert refused(*parts).startswith("part1 does not follow from its results: the verdict of the report is")


def test_a_shard_whose_digest_is_of_another_report(parts, refused):
    """The evidence of a case follows from nothing else in the report."""
    path = parts[1] / "report.json"
    path.write_text(path.read_text().replace('"bytes_moved": 1', '"bytes_moved": 7'))
    said = refused(*parts)
    assert said.startswith("part2: the digest is not ")
    assert said.endswith(": the report was edited after the run")


def test_a_case_that_no_other_shard_was_to_run(parts, refused):
    edit(parts[0], lambda report: report["selection"].update(elsewhere=[IDS[2]], manifest=IDS))
    assert refused(*parts) == f"part2 has {IDS[1]}, which part1 does not leave to another shard"


def test_a_run_may_pass_midnight(parts, refused):
    days = [str(KNOWN.day.replace(year=2020)), str(KNOWN.day), str(KNOWN.day)]
    for number, day in enumerate(days, 1):
        folder = write(f"part{number}", f"{number}/3", known=(KNOWN,))
        edit(folder, lambda report, day=day: report["subject"]["known"][0].update(day=day))
    assert merge(*parts) == 10
    assert document.read(Path("merged")).subject.known[0].day == KNOWN.day


def test_the_report_of_a_shard_is_not_replaced(parts, capsys):
    before = (write("merged", "1/3") / "report.json").read_bytes()
    assert merge(Path("merged"), *parts[1:]) == 2
    said = capsys.readouterr().err
    assert said == "kvconform: --report=merged: it has a shard, which the whole report would replace\n"
    assert Path("merged/report.json").read_bytes() == before


def test_a_folder_that_cannot_be_written(parts, capsys):
    Path("merged").write_text("a file")
    assert merge(*parts) == 2
    assert capsys.readouterr().err.endswith("merged/report.json cannot be written: File exists\n")


def test_a_file_that_is_no_report(parts, refused):
    (parts[2] / "report.json").write_text("{}")
    assert refused(*parts) == "part3/report.json: Object missing required field `suite`"


def test_cases_elsewhere_without_a_shard_do_not_verify(parts, capsys):
    edit(write("all"), lambda report: report["selection"].update(elsewhere=[IDS[0]]))
    assert cli.main(["verify", "all"]) == 1
    said = capsys.readouterr().out
    assert "selection.elsewhere names cases of other shards, but the run had no --kv-shard" in said
    assert f"1 cases are both selected and elsewhere, the first is {IDS[0]}" in said
