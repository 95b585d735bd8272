"""The claims of this project that docs/badges.md and README.md show are what their reports give."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from pathlib import Path

import pytest

from pytest_kvconform.claims import SEEDS, badge
from tests.docs.pages import PAGES, ROOT

CLAIMS = sorted((ROOT / "docs" / "claims").iterdir())
ARCHIVE = "reports.tar.xz"


def shown(page: str, folder: Path) -> set[str]:
    return set(re.findall(rf"claims/{folder.name}/(badge-[\w.-]+\.svg)\)", PAGES[page]))


@pytest.mark.parametrize("folder", CLAIMS, ids=[folder.name for folder in CLAIMS])
def test_badges_follow_from_the_reports(folder: Path) -> None:
    predicate = json.loads((folder / badge.PREDICATE).read_bytes())
    with tarfile.open(folder / ARCHIVE) as archive:
        files = {name: archive.extractfile(name) for name in archive.getnames()}
        reports = {name: file.read() for name, file in files.items() if file}
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


def test_the_first_page_shows_the_reference_connector() -> None:
    [folder] = [folder for folder in CLAIMS if folder.name == "reference_connector"]
    assert shown("README.md", folder) == shown("docs/badges.md", folder) != set()
