"""The claims of this project that docs/badges.md and README.md show are what their reports give."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvconform.claims import SEEDS, badge
from tests.docs.pages import PAGES, blocks, regenerate

regenerate()  # after it, Python finds the modules beside that script
kept_claims = importlib.import_module("kept_claims")
FOLDERS: list[Path] = kept_claims.folders()
CLAIMS = [folder for folder in FOLDERS if (folder / badge.PREDICATE).exists()]


def name_of(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


def verified(argument: str, folder: Path, where: Path) -> str:
    """What kvconform verify prints about a folder, by the commands of docs/badges.md."""
    [script] = [one for one in blocks(PAGES["docs/badges.md"], "console") if "kvconform verify claim" in one]
    script = script.replace("docs/claims/reference_connector/vllm-0.32", str(folder))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", script.replace("verify claim", f"verify {argument}")],
        cwd=where,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shown(page: str, folder: Path) -> set[str]:
    return set(re.findall(rf"claims/{folder.parent.name}/{folder.name}/(badge-[\w.-]+\.svg)\)", PAGES[page]))


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
def test_verify_accepts_a_claim_as_the_page_tells(folder: Path, tmp_path: Path) -> None:
    assert "follow from the 3 reports of the claim" in verified("claim", folder, tmp_path)


@pytest.mark.parametrize("folder", [one for one in FOLDERS if one not in CLAIMS], ids=name_of)
def test_verify_accepts_the_report_of_a_run_of_some_tiers(folder: Path, tmp_path: Path) -> None:
    assert set(kept_claims.reports(folder)) == {f"seed-{SEEDS[0]}/report.json"}
    assert verified(f"claim/seed-{SEEDS[0]}", folder, tmp_path)


def test_the_first_page_shows_the_reference_connector() -> None:
    [folder] = [one for one in CLAIMS if name_of(one) == "reference_connector-vllm-0.32"]
    assert shown("README.md", folder) == shown("docs/badges.md", folder) != set()
