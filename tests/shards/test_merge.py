"""`kvconform merge`: the shards of one run become the report of that run."""

from __future__ import annotations

import json
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
    del report["settings"]["report"], report["digest"]
    return report


@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        ((), {}),
        ((), {"deeds": {"arrive(gemma3*": "violate", "hello(llama*": "blocked"}}),
        ((), {"deeds": {"window(gemma3-P1D2*": "refuse"}, "unsupported": UNEQUAL}),
        ((), {"bench": "leftover"}),
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


def levels(path: Path) -> dict[str, str]:
    """The verdict of each level that ran."""
    words = {one.name: one.word for one in document.read(path).verdict.levels}
    return {name: word for name, word in words.items() if word != "NOT-RUN"}


def test_merged_shards_have_the_level_table_of_the_whole_run(kv, parts, capsys):
    """One level is violated in one shard. Other shards, and the other levels, conform nevertheless."""
    how = {"deeds": {"window(gemma3-P1D2*": "violate"}}
    folders = parts(**how)
    whole = kv(**how)
    assert levels(whole.path) == {
        "core": "CONFORMS",
        "hybrid": "CONFORMS",
        "heterogeneous": "CONFORMS",
        "resilient": "VIOLATES",
    }
    assert merge(folders, capsys)[0] == 1
    merged = json.loads(Path("merged/report.json").read_bytes())
    assert merged["verdict"]["levels"] == whole.report["verdict"]["levels"]
    words = [levels(folder) for folder in folders]
    assert [list(one.values()).count("VIOLATES") for one in words].count(1) == 1
    assert {word for one in words for word in one.values()} == {"CONFORMS", "VIOLATES"}
    assert any(set(one) < set(levels(whole.path)) for one in words)


def test_a_level_of_a_shard_of_a_claim_leaves_out_no_case_of_another_shard(kv, parts, capsys):
    for folder in (folders := parts("--kv-claim")):
        assert set(levels(folder).values()) == {"CONFORMS"}
    assert levels(kv("--kv-claim").path) == dict.fromkeys(
        ("core", "hybrid", "heterogeneous", "resilient"), "CONFORMS"
    )
    assert merge(folders, capsys)[0] == 0
    assert set(levels(Path("merged")).values()) == {"CONFORMS"}


def test_merged_shards_of_runs_with_a_page_have_one(parts, capsys):
    folders = parts("--kv-html")
    code, out, _ = merge(folders, capsys)
    assert (code, "page: merged/report.html" in out) == (0, True)
    assert Path("merged/report.html").is_file()


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
