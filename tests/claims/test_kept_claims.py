"""The claims of this project that docs/badges.md and README.md show are what their reports give."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
from pathlib import Path

import pytest

from pytest_kvconform import cli
from pytest_kvconform.claims import SEEDS, badge
from tests.docs.pages import PAGES, regenerate

regenerate()  # after it, Python finds the modules beside that script
kept_claims = importlib.import_module("kept_claims")
FOLDERS: list[Path] = kept_claims.folders()
CLAIMS = [folder for folder in FOLDERS if (folder / badge.PREDICATE).exists()]


def name_of(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


def shown(page: str, folder: Path) -> set[str]:
    return set(re.findall(rf"claims/{folder.parent.name}/{folder.name}/(badge-[\w.-]+\.svg)\)", PAGES[page]))


def unpacked(folder: Path, where: Path) -> Path:
    """A copy of a folder of docs/claims, with its reports beside the archive."""
    claim = where / "claim"
    shutil.copytree(folder, claim)
    for name, content in kept_claims.reports(folder).items():
        (claim / name).parent.mkdir()
        (claim / name).write_bytes(content)
    return claim


@pytest.mark.parametrize("folder", CLAIMS, ids=name_of)
def test_badges_follow_from_the_reports(folder: Path) -> None:
    predicate = json.loads((folder / badge.PREDICATE).read_bytes())
    reports = kept_claims.reports(folder)
    assert set(reports) == {f"seed-{seed}/report.json" for seed in SEEDS}
    assert [one["seed"] for one in predicate["reports"]] == list(SEEDS)
    for one in predicate["reports"]:
        content = reports[f"seed-{one['seed']}/report.json"]
        assert hashlib.sha256(content).hexdigest() == one["report.json"]["sha256"]
        verdict = json.loads(content)["verdict"]
        assert one["verdict"] == verdict["word"]
        assert predicate["levels"] == {level["name"]: level["word"] for level in verdict["levels"]}
    badges = badge.badges(predicate)
    kept = {file.name: file.read_bytes() for file in folder.glob("badge-*")}
    assert len(badges) == 2 * len(predicate["levels"]) and kept == badges
    assert shown("docs/badges.md", folder) == {name for name in badges if name.endswith(".svg")}


@pytest.mark.parametrize("folder", CLAIMS, ids=name_of)
def test_verify_accepts_a_claim(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(unpacked(folder, tmp_path))]) == 0, capsys.readouterr().out
    assert "follow from the 3 reports of the claim" in capsys.readouterr().out


@pytest.mark.parametrize("folder", [one for one in FOLDERS if one not in CLAIMS], ids=name_of)
def test_verify_accepts_the_report_of_a_run_of_some_tiers(folder: Path, tmp_path: Path) -> None:
    assert set(kept_claims.reports(folder)) == {f"seed-{SEEDS[0]}/report.json"}
    assert cli.main(["verify", str(unpacked(folder, tmp_path) / f"seed-{SEEDS[0]}")]) == 0


def test_the_first_page_shows_the_reference_connector() -> None:
    [folder] = [one for one in CLAIMS if name_of(one) == "reference_connector-vllm-0.32"]
    assert shown("README.md", folder) == shown("docs/badges.md", folder) != set()
