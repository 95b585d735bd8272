"""`kvconform merge`: the shards of one run become the report of that run, and nothing else does."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_kvconform import cli
from pytest_kvconform.report import document
from tests.small_suite.runs import TODAY, declare

SHARDS = 3
UNEQUAL = {"tp-heterogeneous": "one size only"}


@pytest.fixture
def parts(kv, pytester) -> Callable[..., list[Path]]:
    """parts(*arguments, **how): the folders of the reports of all shards of a run."""

    def run(*arguments: str, shards: int = SHARDS, **how: Any) -> list[Path]:
        folders = [pytester.path / f"part{number}" for number in range(1, shards + 1)]
        for number, folder in enumerate(folders, 1):
            kv(f"--kv-shard={number}/{shards}", f"--kv-report={folder.name}", *arguments, **how)
        return folders

    return run


def merge(folders: list[Path], capsys, *more: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(["merge", *map(str, folders), "--report=merged", *more])
    said = capsys.readouterr()
    return code, said.out, said.err


def without_seconds(path: Path) -> dict[str, Any]:
    """The whole report, without durations and the folder of the report."""
    report = json.loads(path.read_bytes())
    for result in report["results"]:
        del result["seconds"]
    del report["settings"]["report"]
    return report


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "report.json"
    report = json.loads(path.read_bytes())
    change(report)
    path.write_text(json.dumps(report))


# ---- what is merged ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        ((), {}),
        ((), {"deeds": {"arrive(gemma3*": "violate", "hello(llama*": "blocked"}}),
        ((), {"deeds": {"window(gemma3-P1D2*": "refuse"}, "unsupported": UNEQUAL}),
        ((), {"deeds": {"*n63*": "assert"}}),
        ((), {"bench": "leftover"}),
        ((), {"bench": "no vllm"}),
        ((), {"undeclared": True}),
        (("--kv-claim",), {}),
        (("--kv-claim", "--kv-topology=P1D1"), {"shards": 2}),
        (("--kv-matrix=full", "--kv-seed=3"), {}),
        (("-k", "not window"), {}),
    ],
    ids=lambda value: " ".join(map(str, value)) or "plain",
)
def test_merged_shards_equal_the_whole_run(kv, parts, capsys, arguments, how):
    """Every key of the report is the same, but for durations and sentences about single processes."""
    folders = parts(*arguments, **how)
    how.pop("shards", None)
    whole = kv(*arguments, **how)
    code, out, _ = merge(folders, capsys)
    merged, expected = without_seconds(Path("merged/report.json")), without_seconds(whole.path)
    assert code == whole.code == expected["verdict"]["exit_code"]
    if how.get("bench") == "leftover":  # each of the shards had such a process
        assert merged.pop("troubles") == SHARDS * expected.pop("troubles")
    assert merged == expected
    assert out.splitlines()[-1] == "report: merged/report.json"
    assert cli.main(["verify", "merged"]) == 0


def test_a_shard_says_which_it_is_and_what_it_leaves_to_others(kv, parts, capsys):
    [first, *_] = parts()
    report = document.read(first)
    assert report.verdict.word == "CONFORMS"
    assert report.verdict.sentence.endswith(", in shard 1/3 alone")
    assert report.selection.left_out == 0
    assert len(report.selection.selected) + len(report.selection.elsewhere) == 13
    assert len(report.results) == len(report.selection.selected)
    run = kv("--kv-shard=1/3")
    assert f"shard 1/3: {len(report.results)} of 13 cases; see kvconform merge" in run.lines
    assert not any(line.startswith("selection") for line in run.lines)
    capsys.readouterr()
    assert cli.main(["verify", str(first)]) == 0


def test_a_shard_of_a_selection_says_both(kv):
    run = kv("--kv-shard=1/2", "--kv-family=gemma3")
    assert "selection: 10 of 13" in run.lines
    assert any(line.startswith("shard 1/2: ") and " of 10 cases" in line for line in run.lines)


def test_workers_of_xdist_run_the_shard_alone(kv):
    alone, workers = kv("--kv-shard=2/3"), kv("--kv-shard=2/3", "-n2")
    assert workers.outcomes == alone.outcomes
    assert workers.report["selection"] == alone.report["selection"]


def test_the_line_that_runs_a_case_again_names_no_shard(kv):
    run = kv("--kv-shard=1/1", deeds={"arrive(llama-P1D1-n63*": "violate"})
    [again] = [line for line in run.lines if line.startswith("again")]
    assert "--kv-shard" not in again


def test_a_known_failure_of_another_shard_is_not_missed(kv, parts, pytester, capsys):
    entry = (
        '[[known]]\ncase = "kv::engine/bytes::window[gemma3-*]"\nissue = "https://example.org/1"\n'
        f'reason = "lost"\nexpires = {TODAY}\n'
    )
    declare(pytester.path / "known.toml", {}, entry)
    how = {"undeclared": True, "deeds": {"window*": "violate"}}
    whole = kv("--kv-declare=known.toml", **how)
    folders = parts("--kv-declare=known.toml", **how)
    words = {document.read(folder).verdict.word for folder in folders}
    assert words == {"CONFORMS", "CONFORMS-EXCEPT"}
    assert merge(folders, capsys)[0] == 0
    assert without_seconds(Path("merged/report.json")) == without_seconds(whole.path)


def test_a_run_may_pass_midnight(parts, pytester, capsys):
    entry = (
        '[[known]]\ncase = "kv::engine/bytes::window[gemma3-*]"\nissue = "https://example.org/1"\n'
        'reason = "lost"\nexpires = 2999-01-01\n'
    )
    declare(pytester.path / "known.toml", {}, entry)
    folders = parts("--kv-declare=known.toml", undeclared=True, deeds={"window*": "violate"})
    before = str(TODAY - datetime.timedelta(days=1))
    edit(folders[0], lambda report: report["subject"]["known"][0].update(day=before))
    assert merge(folders, capsys)[0] == 0
    assert document.read(Path("merged")).subject.known[0].day == TODAY


def test_an_interrupted_shard_makes_the_run_incomplete(parts, capsys):
    folders = parts()
    edit(folders[1], lambda report: report["results"].clear())
    report = document.read(folders[1])
    folders[1].joinpath("report.json").write_bytes(
        document.encode(document.msgspec.structs.replace(report, verdict=document.recompute_verdict(report)))
    )
    code, out, _ = merge(folders, capsys)
    assert code == 10
    assert "of 13 cases that were selected have no result" in out


def test_the_page_of_a_ci_job_gets_the_merged_verdict(parts, capsys, monkeypatch, tmp_path):
    folders = parts()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert merge(folders, capsys)[0] == 0
    assert "**CONFORMS**" in (tmp_path / "summary.md").read_text()


# ---- what is refused -----------------------------------------------------------------------------


def refused(folders: list[Path], capsys, *more: str) -> str:
    """The sentence of a refusal; nothing is written."""
    code, out, err = merge(folders, capsys, *more)
    assert (code, out) == (2, "")
    assert not Path("merged").exists()
    [line] = err.splitlines()
    return line.removeprefix("kvconform: ").replace(str(Path.cwd()) + "/", "")


def test_a_missing_shard(parts, capsys):
    one, two, three = parts()
    assert refused([one, three], capsys) == "shard 2/3 is missing: give all 3"
    assert refused([two], capsys) == "shards 1/3, 3/3 are missing: give all 3"


def test_a_shard_twice(parts, capsys):
    one, two, three = parts()
    assert refused([one, two, three, two], capsys) == "shard 2/3 is there twice: part2 and part2"


def test_shards_of_two_divisions(kv, parts, capsys):
    one, two, _ = parts()
    kv("--kv-shard=2/2", "--kv-report=half")
    said = refused([one, two, Path("half")], capsys)
    assert said == "part1 is shard 1/3, and half is shard 2/2: give the shards of one division"


def test_a_whole_run_is_no_shard(kv, parts, capsys):
    one, two, _ = parts()
    kv("--kv-report=all")
    assert refused([one, two, Path("all")], capsys) == "all is no shard: its run had no --kv-shard"


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--kv-family=gemma3", "setting family is [] in one and ['gemma3'] in the other"),
        ("--kv-matrix=full", "setting matrix is 'quick' in one and 'full' in the other"),
        ("--kv-timeout-scale=2", "setting timeout-scale is 1.0 in one and 2.0 in the other"),
        ("--kv-claim", "setting claim is False in one and True in the other"),
        ("--kv-connector=m:D", "setting connector is 'm:C' in one and 'm:D' in the other"),
    ],
)
def test_shards_of_other_settings(kv, parts, capsys, argument, says):
    one, _ = parts(shards=2)
    kv("--kv-shard=2/2", argument, "--kv-report=other")
    said = refused([one, Path("other")], capsys)
    assert said == f"part1 and other are not of one run: {says}"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda report: report.update(suite="2026.1"), "the suite is 2026.1 in one"),
        (lambda report: report["environment"].update(vllm="0.33.0"), "vllm is '0.33.0' in one"),
        (lambda report: report["facts"].update(layout="NHD"), "facts.layout is 'NHD' in one"),
        (lambda report: report["subject"].update(profile="p2p2"), "subject.profile is 'p2p2' in one"),
        (lambda report: report["selection"]["manifest"].append("kv::z"), "selection.manifest differs"),
        (lambda report: report.update(should=["KV-X-001"]), "the rules of strength SHOULD differ"),
    ],
)
def test_shards_of_other_machines_and_subjects(parts, capsys, change, says):
    folders = parts()
    edit(folders[0], change)
    said = refused(folders, capsys)
    assert said.startswith(f"part1 and part2 are not of one run: {says}")


def test_the_file_of_the_connector_may_lie_elsewhere(parts, capsys):
    folders = parts()
    for folder in folders:
        edit(folder, lambda report: report["facts"].update(file=f"/somewhere/{len(report['results'])}.py"))
    assert merge(folders, capsys)[0] == 0


def test_a_shard_that_was_edited(parts, capsys):
    folders = parts(deeds={"arrive(gemma3*": "violate"})
    [folder, *_] = [one for one in folders if document.read(one).verdict.word == "VIOLATES"]

    def change(report: dict[str, Any]) -> None:
        for result in report["results"]:
            result.update(
                outcome="PASS",
                finding=None,
                evidence={"looked_at": 1, "unit": "bytes", "bytes_moved": 1},
            )

    edit(folder, change)
    said = refused(folders, capsys)
    assert said.startswith(f"{folder.name} does not follow from its results: the verdict of the report is")


def test_a_case_that_two_shards_have(parts, capsys):
    one, two, three = parts()

    def take(report: dict[str, Any]) -> None:
        first = json.loads((two / "report.json").read_bytes())["selection"]["selected"][0]
        report["selection"]["elsewhere"].remove(first)

    edit(one, take)
    said = refused([one, two, three], capsys)
    assert said.startswith("part2 has kv::")
    assert said.endswith(", which part1 does not leave to another shard")


def test_the_report_of_a_shard_is_not_replaced(parts, capsys):
    folders = parts()
    shutil.copytree(folders[0], "merged")
    code, _, err = merge([Path("merged"), *folders[1:]], capsys)
    assert (code, err) == (
        2,
        "kvconform: --report=merged: it has a shard, which the whole report would replace\n",
    )
    assert document.read(Path("merged")) == document.read(folders[0])


def test_a_file_that_is_no_report(parts, capsys):
    folders = parts()
    (folders[2] / "report.json").write_text("{}")
    assert "Object missing required field" in refused(folders, capsys)


def test_cases_elsewhere_without_a_shard_do_not_verify(kv, capsys):
    path = kv().path
    edit(path.parent, lambda report: report["selection"].update(elsewhere=["kv::x"]))
    assert cli.main(["verify", str(path)]) == 1
    assert "selection.elsewhere names cases of other shards, but the run had no --kv-shard" in (
        capsys.readouterr().out
    )
