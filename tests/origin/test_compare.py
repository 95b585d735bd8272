"""A report is judged by the manifest of the suite that made it, which an edit of the report cannot change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_kvconform import __version__, cli
from pytest_kvconform.report import document
from pytest_kvconform.report.origin import commits, compare, manifest
from tests.origin.checkouts import SuiteCheckout
from tests.report.test_verify import seal, verified
from tests.small_suite.runs import COMMIT

WINDOW = "kv::engine/bytes::window[gemma3-P1D1]"
OTHER = "0ff0" * 10
Edit = Callable[[dict[str, Any]], object]


def drop(raw: dict[str, Any], *names: str) -> None:
    """Take cases out of a report as if the suite had none of them."""
    for key in ("manifest", "selected"):
        raw["selection"][key] = [name for name in raw["selection"][key] if name not in names]
    raw["results"] = [result for result in raw["results"] if result["id"] not in names]
    for group in raw["manifest"]["cases"]:
        group["ids"] = [name for name in group["ids"] if name not in names]
    raw["manifest"]["cases"] = [group for group in raw["manifest"]["cases"] if group["ids"]]


def drop_rule(raw: dict[str, Any], name: str) -> None:
    raw["manifest"]["rules"] = [rule for rule in raw["manifest"]["rules"] if rule["id"] != name]


def edit(path: Path, *changes: Edit) -> None:
    """Change a report, and make of it what the suite itself would make of the change."""
    raw = json.loads(path.read_bytes())
    for change in changes:
        change(raw)
    seal(path, raw)
    report = document.read(path)
    path.write_bytes(
        document.encode(msgspec.structs.replace(report, verdict=document.recompute_verdict(report)))
    )


def named(version: str = __version__, commit: str = "") -> Edit:
    """The edit after which a report names this suite."""
    return lambda raw: raw.update(suite=version, commits={"suite": commit} if commit else {})


def test_a_report_has_the_commit_and_the_manifest_of_its_suite(kv, capsys):
    path = kv("--kv-family=llama").path
    report = document.read(path)
    assert report.commits == {"suite": COMMIT}
    capsys.readouterr()
    assert cli.main(["list", "manifest"]) == 0
    printed = capsys.readouterr().out.strip()
    assert hashlib.sha256(printed.encode()).hexdigest() == report.manifest.digest
    assert msgspec.json.decode(printed, type=manifest.Manifest) == report.manifest
    assert report.manifest.by_id.keys() == {*report.selection.manifest}
    assert len(report.manifest.by_id) == 13
    group = report.manifest.by_id[WINDOW]
    assert (group.rule, group.level, group.limits) == ("KV-BYTES-002", "resilient", ())
    assert group.features == ("full-attention", "sliding-window")
    assert [rule.id for rule in report.manifest.rules] == ["KV-ANSWER-001", "KV-BYTES-001", "KV-BYTES-002"]


@pytest.mark.parametrize(
    ("says", "of"),
    [
        ("1 cases of the suite are not in the manifest", named()),
        ("neither this suite nor in its list of releases", named("2026.1")),
        ("neither this suite nor in its list of releases", named("2999.1.0")),
        ("with changes that no commit has", named(commit=f"{OTHER}-dirty")),
        ("not in the history of this suite", named(commit=OTHER)),
    ],
)
def test_a_claim_without_the_case_that_failed_is_refused(claimed, capsys, monkeypatch, says, of):
    """Whoever drops a case says of which suite the claim is: this one, or one that nobody can look up."""
    claim = claimed(deeds={"window(gemma3-P1D1*": "violate"})
    for seed in (1, 2, 3):
        edit(claim / f"seed-{seed}" / "report.json", lambda raw: drop(raw, WINDOW), of)
    if says.startswith("1 cases"):
        monkeypatch.setattr(commits, "of_suite", str)
        monkeypatch.setattr(commits, "needs_commit", lambda version: False)  # a release, as pip installs it
    code, lines = verified(claim, capsys)
    assert document.read(claim / "seed-1").verdict.word == "CONFORMS"
    assert code == 1
    assert len([line for line in lines if says in line]) == 3
    assert cli.main(["badge", str(claim)]) == 2


def test_one_report_of_an_unknown_suite_is_judged_by_itself(kv, capsys):
    path = kv().path
    edit(path, named("2026.1"), lambda raw: drop(raw, WINDOW))
    capsys.readouterr()
    assert cli.main(["verify", str(path)]) == 0
    said = capsys.readouterr().err
    assert said.startswith("the manifest is not compared: suite 2026.1 made the report, and it is neither")


def test_a_report_from_before_manifests_is_of_no_claim(claimed, capsys):
    claim = claimed()
    for seed in (1, 2, 3):
        path = claim / f"seed-{seed}" / "report.json"
        raw = json.loads(path.read_bytes())
        del raw["manifest"], raw["commits"]
        for row in raw["verdict"]["features"]:  # such a suite did not ask why no case looked at a feature
            row["observed"] = {"not selected": "not looked at"}.get(row["observed"], row["observed"])
        seal(path, raw)
    sentence = (
        f"suite {__version__} made the report before suites wrote the manifest of their cases into it, so "
        "that nobody can tell which cases it had: make it again"
    )
    assert verified(claim, capsys) == (1, [f"{claim}/seed-{seed}: {sentence}" for seed in (1, 2, 3)])
    assert cli.main(["verify", str(claim / "seed-1")]) == 0
    assert capsys.readouterr().err == f"the manifest is not compared: {sentence}\n"


@pytest.mark.parametrize(
    ("commit", "says"), [("", "no commit"), (f"{OTHER}-dirty", "changes that no commit")]
)
def test_a_claim_of_a_suite_that_nobody_finds_again_has_no_badge(claimed, capsys, monkeypatch, commit, says):
    monkeypatch.setattr(commits, "of_suite", lambda: commit)
    assert cli.main(["badge", str(claimed())]) == 2
    assert f"its suite {__version__} is of no release, and has {says}" in capsys.readouterr().err
    assert cli.main(["claim", "--connector=m:C"]) == 2
    assert f"this suite, {__version__}, is of no release, and has {says}" in capsys.readouterr().err


def test_what_belongs_to_a_case_is_compared_too(kv, capsys):
    path = kv().path

    def move(raw: dict[str, Any]) -> None:
        for group in raw["manifest"]["cases"]:
            if group["rule"] == "KV-BYTES-002":
                group["level"] = "accurate"
        for result in raw["results"]:
            if result["rule"] == "KV-BYTES-002":
                result["level"] = "accurate"

    edit(path, move)
    code, lines = verified(path, capsys)
    assert (code, len(lines)) == (1, 2)
    assert lines[0] == f"{WINDOW}: level of the manifest is not level of the case"


@pytest.mark.parametrize("part", ["rules", "features", "settings"])
def test_every_part_of_the_manifest_is_that_of_the_suite(kv, capsys, part):
    path = kv().path
    raw = json.loads(path.read_bytes())
    if part == "rules":
        raw["manifest"]["rules"][0]["strength"] = "MUST"
        raw["should"] = []
    elif part == "features":
        raw["manifest"]["features"].remove("lease")
        raw["verdict"]["features"] = [row for row in raw["verdict"]["features"] if row["name"] != "lease"]
    else:
        raw["manifest"]["settings"]["timeout-scale"] = 9.0
    seal(path, raw)
    assert verified(path, capsys) == (1, [f"manifest.{part} are not those of the suite"])


def test_a_release_is_known_by_the_digest_of_its_manifest(claimed, capsys, monkeypatch):
    claim = claimed()
    older = (
        named("2026.1"),
        lambda raw: drop(raw, WINDOW),
        lambda raw: drop(raw, WINDOW.replace("D1", "D2")),
    )
    for seed in (1, 2, 3):
        edit(claim / f"seed-{seed}" / "report.json", *older, lambda raw: drop_rule(raw, "KV-BYTES-002"))
    digest = document.read(claim / "seed-1").manifest.digest
    monkeypatch.setattr(compare, "releases", lambda: {"2026.1": digest})
    assert cli.main(["badge", str(claim)]) == 0
    code, lines = verified(claim, capsys)
    assert code == 0
    assert lines[1:] == [
        "suite 2026.1 made it, with all of its 11 cases; this suite has 13:",
        "  1 new rule:",
        "    KV-BYTES-002",
        "  2 new cases:",
        "    kv::engine/bytes::window[gemma3-P1D1]",
        "    kv::engine/bytes::window[gemma3-P1D2]",
    ]
    edit(claim / "seed-2" / "report.json", lambda raw: drop(raw, "kv::engine/bytes::arrive[llama-P1D1-n63]"))
    code, lines = verified(claim, capsys)
    assert code == 1
    assert f"{claim}/seed-2: the manifest is not that of release 2026.1: its digest is not {digest}" in lines


def test_a_later_suite_knows_features_that_nobody_could_declare(kv, capsys, monkeypatch):
    """A feature that is new since then is not declared, and does not make the report INCOMPLETE."""
    path = kv().path

    def before(raw: dict[str, Any]) -> None:
        raw["manifest"]["features"].remove("multi-connector")
        del raw["subject"]["features"]["multi-connector"]

    edit(path, named("2026.1"), before)
    assert document.read(path).verdict.word == "CONFORMS"
    monkeypatch.setattr(compare, "releases", lambda: {"2026.1": document.read(path).manifest.digest})
    code, lines = verified(path, capsys)
    assert (code, lines[2:]) == (0, ["  1 new feature:", "    multi-connector"])


# ---- the history of a checkout ----------------------------------------------------------------------------


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SuiteCheckout:
    """A checkout in which this suite lies, as far as it asks git."""
    made = SuiteCheckout(tmp_path / "suite")
    monkeypatch.setattr(commits, "SUITE", made.packages[0])
    monkeypatch.setattr(commits, "PACKAGES", made.packages)
    compare._listed.cache_clear()
    return made


def test_a_commit_of_the_checkout_is_asked_for_its_manifest(kv, claimed, capsys, suite):
    """The earlier suite has no unequal sizes. Its report has all that it had, and may lack no more."""
    today = suite.folder / "fakekv" / "cells.py"
    text = today.read_text()
    suite.replace("cells.py", '("gemma3", "P1D1"), ("gemma3", "P1D2")]', '("gemma3", "P1D1")]')
    earlier = suite.commit()
    suite.git("checkout", "-q", "-b", "dropped")
    suite.replace("cells.py", '("gemma3", "P1D1")]', "]")
    elsewhere = suite.commit()
    suite.git("checkout", "-q", "main")
    today.write_text(text)
    suite.commit()

    claim = claimed()
    new = [name for name in document.read(claim / "seed-1").manifest.by_id if "-P1D2" in name]
    for seed in (1, 2, 3):
        edit(claim / f"seed-{seed}" / "report.json", named(commit=earlier), lambda raw: drop(raw, *new))
    assert cli.main(["badge", str(claim)]) == 0
    code, lines = verified(claim, capsys)
    assert code == 0
    made = f"suite {__version__} of commit {earlier} made it, with all of its 8 cases; this suite has 13:"
    assert lines[1:3] == [made, "  5 new cases:"]
    assert "    kv::engine/bytes::arrive[gemma3-P1D2-{n16,n63,n95}]" in lines

    path = claim / "seed-1" / "report.json"
    edit(path, lambda raw: drop(raw, WINDOW))
    code, lines = verified(path, capsys)
    assert (code, lines) == (
        1,
        [f"1 cases of the suite are not in the manifest, the first is {WINDOW}"],
    )
    edit(path, named(commit=elsewhere))
    assert verified(path, capsys)[0] == 0
    assert "that commit is not in the history of this suite" in compared(path, capsys)


def compared(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Why the manifest of a report is not compared."""
    capsys.readouterr()
    cli.main(["verify", str(path)])
    return capsys.readouterr().err


def test_a_commit_that_cannot_print_its_manifest(kv, capsys, suite):
    (suite.packages[0] / "cli.py").write_text("raise SystemExit(2)")
    broken = suite.commit()
    path = kv().path
    edit(path, named(commit=broken), lambda raw: drop(raw, WINDOW))
    assert f"commit {broken} does not print its manifest" in compared(path, capsys)


# ---- releases ---------------------------------------------------------------------------------------------


def test_a_release_has_its_line(monkeypatch):
    """A version that is of no release has none. CONTRIBUTING.md tells how a release gets it."""
    monkeypatch.delenv("_KVCONFORM_TEST_PACKAGE", raising=False)
    digest = manifest.of_suite("quick").digest
    assert compare.releases().get(__version__) == (None if commits.needs_commit(__version__) else digest)
